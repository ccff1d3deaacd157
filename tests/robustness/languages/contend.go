// Contend for a lock with the client of docs/languages, and record a history: contend HISTORY LOCK STOP TTL
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"dblock"
)

var file *os.File
var lock string
var numbers int

// The machine's monotonic clock, as Python's.
func now() float64 {
	var ts syscall.Timespec
	syscall.Syscall(syscall.SYS_CLOCK_GETTIME, 1, uintptr(unsafe.Pointer(&ts)), 0)
	return float64(ts.Sec) + float64(ts.Nsec)/1e9
}

type details map[string]any

func write(line map[string]any) {
	text, err := json.Marshal(line)
	check(err)
	_, err = file.Write(append(text, '\n'))
	check(err)
}

func begin(kind string, what details, at float64) int {
	number := numbers
	numbers++
	write(map[string]any{"id": number, "at": at, "kind": kind, "key": lock, "details": what})
	return number
}

func end(number int, outcome string, what details) {
	write(map[string]any{"id": number, "at": now(), "outcome": outcome, "details": what})
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func turn(locks *dblock.Locks, ttl, hold, timeout float64) {
	acquiring := begin("acquire", details{"ttl": ttl, "timeout": timeout, "keep_alive": true}, now())
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(timeout*1e9))
	lease, err := locks.Acquire(ctx, lock, time.Duration(ttl*1e9))
	cancel()
	if err == context.DeadlineExceeded {
		end(acquiring, "failed", details{})
		return
	}
	check(err)
	end(acquiring, "ok", details{"token": lease.Token})
	for ends := now() + hold; ; time.Sleep(5 * time.Millisecond) {
		before := now()
		if !lease.IsHeld() {
			end(begin("loss", details{"token": lease.Token}, now()), "ok", details{})
			break
		}
		end(begin("believe", details{"token": lease.Token}, before), "ok", details{})
		if now() >= ends {
			break
		}
	}
	releasing := begin("release", details{"token": lease.Token}, now())
	freed, err := lease.Release()
	check(err)
	end(releasing, "ok", details{"freed": freed})
}

func main() {
	var err error
	file, err = os.OpenFile(os.Args[1], os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	check(err)
	lock = os.Args[2]
	ttl, err := strconv.ParseFloat(os.Args[4], 64)
	check(err)
	locks, err := dblock.Open(os.Getenv("DBLOCK_DSN"))
	check(err)
	fmt.Println("ready")
	bufio.NewReader(os.Stdin).ReadString('\n')
	for number := 1; ; number++ {
		if _, err := os.Stat(os.Args[3]); err == nil {
			break
		}
		hold, timeout := rand.Float64()*0.01, 30.0
		// Every tenth wait may end before its turn, and one of forty holds outlasts a lease that is not renewed.
		if number%40 == 10 {
			hold = ttl * 1.3
		}
		if number%10 == 5 {
			timeout = 0.02
		}
		turn(locks, ttl, hold, timeout)
	}
	check(locks.Close())
}
