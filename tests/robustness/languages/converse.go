// Use the client of docs/languages as each line of standard input says: one word, then its arguments, between tabs.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"dblock"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func seconds(text string) time.Duration {
	number, err := strconv.ParseFloat(text, 64)
	check(err)
	return time.Duration(number * float64(time.Second))
}

func main() {
	locks, err := dblock.Open(os.Getenv("DBLOCK_DSN"))
	check(err)
	var lease *dblock.Lease
	var released *atomic.Bool
	fmt.Println("ready")
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		words := strings.Split(lines.Text(), "\t")
		switch words[0] {
		case "acquire":
			ctx, cancel := context.WithTimeout(context.Background(), seconds(words[3]))
			mine, err := locks.Acquire(ctx, words[1], seconds(words[2]))
			cancel()
			if errors.Is(err, context.DeadlineExceeded) {
				fmt.Println("busy")
			} else if err != nil {
				fmt.Println("failed", err)
			} else {
				lease, released = mine, &atomic.Bool{}
				fmt.Println("granted", mine.Token)
				go func(mine *dblock.Lease, released *atomic.Bool) {
					<-mine.Context().Done()
					if !released.Load() {
						fmt.Println("lost")
					}
				}(lease, released)
			}
		case "held":
			fmt.Println(lease.IsHeld())
		case "release":
			released.Store(true)
			if freed, err := lease.Release(); err != nil {
				fmt.Println("failed", err)
			} else {
				fmt.Println(freed)
			}
		}
	}
	check(locks.Close())
}
