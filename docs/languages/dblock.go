// Package dblock is a client of dblock in one file: copy it. It needs only a driver: go get github.com/lib/pq
//
//	locks, err := dblock.Open(os.Getenv("DBLOCK_DSN"))
//	lease, err := locks.Acquire(ctx, "invoice:42", 30*time.Second)   // the context bounds the wait
//	defer lease.Release()
//	work(lease.Context(), lease.Token)                               // cancelled when the lease is lost
//
// It waits in the same queue as every other client, listens for its turn, and renews its leases.
package dblock

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/lib/pq"
)

// Locks is the service. One is enough for a process.
type Locks struct {
	db       *sql.DB
	listener *pq.Listener
	client   string
	mutex    sync.Mutex
	waiting  map[string]chan struct{} // attempt → the channel that wakes it
}

func uuid() string {
	b := make([]byte, 16)
	if _, err := rand.Read(b); err != nil {
		panic(err)
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

const patience = 5 * time.Second // to wait for a connection, or for a reply: then a call fails

type impatient struct{ net.Conn }

func (conn impatient) Read(b []byte) (int, error) {
	conn.SetReadDeadline(time.Now().Add(patience))
	return conn.Conn.Read(b)
}

type dialer struct{}

func (d dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialTimeout(network, address, patience)
}

func (dialer) DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	conn, err := net.DialTimeout(network, address, timeout)
	return impatient{conn}, err
}

// Open connects to the database. The listener must not go through a pooler in transaction mode.
func Open(dsn string) (*Locks, error) {
	connector, err := pq.NewConnector(dsn)
	if err != nil {
		return nil, err
	}
	connector.Dialer(dialer{})
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(3)
	if err := db.Ping(); err != nil { // the listener would try again without end
		db.Close()
		return nil, err
	}
	locks := &Locks{db: db, client: uuid(), waiting: map[string]chan struct{}{}}
	locks.listener = pq.NewListener(dsn, time.Second, 10*time.Second, nil) // connects again by itself
	if err := locks.listener.Listen("dblock_" + strings.ReplaceAll(locks.client, "-", "")); err != nil {
		locks.listener.Close()
		db.Close()
		return nil, err
	}
	go func() {
		for note := range locks.listener.Notify {
			if note != nil { // nil after a reconnect: waiters ask once a second anyway
				locks.mutex.Lock()
				if wake, ok := locks.waiting[note.Extra]; ok {
					select {
					case wake <- struct{}{}:
					default: // it has a wake-up already
					}
				}
				locks.mutex.Unlock()
			}
		}
	}()
	return locks, nil
}

// Acquire waits for the lock until the context is done.
func (locks *Locks) Acquire(ctx context.Context, name string, ttl time.Duration) (*Lease, error) {
	attempt, wake, hadTicket := uuid(), make(chan struct{}, 1), false
	locks.mutex.Lock()
	locks.waiting[attempt] = wake // before the call, so that no notification is missed
	locks.mutex.Unlock()
	defer func() {
		locks.mutex.Lock()
		delete(locks.waiting, attempt)
		locks.mutex.Unlock()
	}()
	for {
		asked := time.Now() // it has a reading of the monotonic clock
		var granted bool
		var token, ticket sql.NullInt64
		var remaining float64
		// Without the context: a call whose reply is not read could leave a grant behind.
		err := locks.db.QueryRow(
			`SELECT granted, token, remaining, ticket FROM dblock.acquire($1, ttl => make_interval(secs => $2),
			   holder => $3, attempt => $4, client => $5, had_ticket => $6)`,
			name, ttl.Seconds(), fmt.Sprintf("go pid %d", os.Getpid()), attempt, locks.client, hadTicket,
		).Scan(&granted, &token, &remaining, &ticket)
		if err != nil {
			return nil, err
		}
		if granted {
			return newLease(locks, name, token.Int64, ttl, asked, remaining), nil
		}
		hadTicket = hadTicket || ticket.Valid
		// Ask again in a second at the latest: the call is also the heartbeat of the ticket.
		timer := time.NewTimer(clamp(seconds(remaining), 50*time.Millisecond, time.Second))
		select {
		case <-wake:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			// Gives the ticket back, and the lock too if it was granted at this moment.
			if _, err := locks.db.Exec("SELECT dblock.abandon($1, $2)", name, attempt); err != nil {
				return nil, err
			}
			return nil, ctx.Err()
		}
		timer.Stop()
	}
}

// Close gives up the tickets of this process. Release your leases before.
func (locks *Locks) Close() error {
	_, err := locks.db.Exec("SELECT dblock.leave_queue($1)", locks.client)
	locks.listener.Close()
	locks.db.Close()
	return err
}

// Lease is held from the grant until Release, unless it is lost.
type Lease struct {
	Name  string
	Token int64 // the fencing token: pass it to every resource that you write to
	locks *Locks
	ctx   context.Context
	end   context.CancelFunc
	mutex sync.Mutex
	until time.Time
	watch *time.Timer
}

func newLease(locks *Locks, name string, token int64, ttl time.Duration, asked time.Time, remaining float64) *Lease {
	lease := &Lease{Name: name, Token: token, locks: locks}
	lease.ctx, lease.end = context.WithCancel(context.Background())
	lease.watch = time.AfterFunc(time.Hour, func() { lease.IsHeld() })
	lease.trust(asked, remaining)
	go lease.keepAlive(ttl)
	return lease
}

// Context is cancelled when the lease is lost or released.
func (lease *Lease) Context() context.Context { return lease.ctx }

// IsHeld returns whether the lease is held for certain. A process that was stopped has not run its timers.
func (lease *Lease) IsHeld() bool {
	lease.mutex.Lock()
	defer lease.mutex.Unlock()
	if !time.Now().Before(lease.until) {
		lease.end()
	}
	return lease.ctx.Err() == nil
}

// Trust the lease for 98 % of what is left, from the moment before the request.
func (lease *Lease) trust(asked time.Time, remaining float64) {
	lease.mutex.Lock()
	defer lease.mutex.Unlock()
	lease.until = asked.Add(seconds(remaining * 0.98))
	lease.watch.Reset(time.Until(lease.until)) // ends the context in time, even if a renewal waits for its reply
}

func (lease *Lease) keepAlive(ttl time.Duration) {
	for pause := ttl / 3; ; {
		select {
		case <-lease.ctx.Done():
			return
		case <-time.After(pause):
		}
		asked, remaining := time.Now(), 0.0
		err := lease.locks.db.QueryRow(
			"SELECT remaining FROM dblock.renew($1, $2, make_interval(secs => $3))", lease.Name, lease.Token, ttl.Seconds(),
		).Scan(&remaining)
		switch {
		case err == nil:
			lease.trust(asked, remaining)
			pause = ttl / 3
		case errors.Is(err, sql.ErrNoRows):
			lease.end() // another client may hold the lock
		default:
			pause = ttl / 20 // no reply: try again until the end of the trust window
		}
	}
}

// Release frees the lock and wakes the next waiter. False: it was not held under this token any more.
func (lease *Lease) Release() (released bool, err error) {
	lease.end()
	err = lease.locks.db.QueryRow("SELECT dblock.release($1, $2, durable => false)", lease.Name, lease.Token).Scan(&released)
	return released, err
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func clamp(d, least, most time.Duration) time.Duration {
	if d > most {
		d = most
	}
	if d < least {
		d = least
	}
	return d
}
