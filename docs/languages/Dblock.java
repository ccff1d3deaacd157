// A client of dblock for Java 17 in one file: copy it. It needs only the driver: org.postgresql:postgresql
//
//     try (var locks = Dblock.open(url, user, password)) {
//         Dblock.Lease lease = locks.acquire("invoice:42", Duration.ofSeconds(30), Duration.ofSeconds(5));  // or null
//         try { work(lease.token, lease.lost); } finally { lease.release(); }
//     }
//
// It waits in the same queue as every other client, listens for its turn, and renews its leases. `lease.lost` is a
// CompletableFuture that completes when the lease is lost. One Dblock serves all threads of a process.

import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.Duration;
import java.util.Deque;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedDeque;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import org.postgresql.PGConnection;
import org.postgresql.PGNotification;

public final class Dblock implements AutoCloseable {
    private final String url;
    private final Properties settings = new Properties();
    private final UUID client = UUID.randomUUID();
    private final Map<String, Semaphore> waiting = new ConcurrentHashMap<>(); // attempt → what wakes it
    private final Set<Lease> leases = ConcurrentHashMap.newKeySet();
    private final Deque<Connection> idle = new ConcurrentLinkedDeque<>(); // or take them from your own pool
    private final ScheduledExecutorService renewals = Executors.newSingleThreadScheduledExecutor(Dblock::daemon);
    /** Ends trust windows in time even while a renewal waits for its reply. */
    private final ScheduledExecutorService watch = Executors.newSingleThreadScheduledExecutor(Dblock::daemon);
    private volatile boolean closing;

    private Dblock(String url, String user, String password) {
        this.url = url;
        if (user != null) settings.setProperty("user", user);
        if (password != null) settings.setProperty("password", password);
        settings.setProperty("socketTimeout", "5"); // seconds to wait for a reply: then a call fails
    }

    /** Connect to the database. The listener must not go through a pooler in transaction mode. */
    public static Dblock open(String url, String user, String password) throws SQLException {
        Dblock locks = new Dblock(url, user, password);
        Connection listener = locks.listener();
        daemon(() -> locks.listen(listener)).start();
        return locks;
    }

    private Connection listener() throws SQLException {
        Connection connection = DriverManager.getConnection(url, settings);
        connection.createStatement().execute("LISTEN dblock_" + client.toString().replace("-", ""));
        return connection;
    }

    private void listen(Connection listener) {
        while (!closing) {
            try {
                if (listener == null) listener = listener();
                PGNotification[] heard = listener.unwrap(PGConnection.class).getNotifications(1000);
                if (heard == null) continue;
                for (PGNotification one : heard) {
                    Semaphore wake = waiting.get(one.getParameter());
                    if (wake != null) wake.release();
                }
            } catch (SQLException error) {
                discard(listener);
                listener = null; // connect again; waiters ask once a second in the meantime
                pause(500);
            }
        }
        discard(listener);
    }

    private interface Reader<T> { T read(ResultSet row) throws SQLException; }

    /** Run one statement in its own transaction, and return what the reader makes of its row, or null. */
    private <T> T call(Reader<T> reader, String sql, Object... values) throws SQLException {
        Connection connection = idle.poll();
        if (connection == null) connection = DriverManager.getConnection(url, settings); // in autocommit
        try (PreparedStatement statement = connection.prepareStatement(sql)) {
            for (int i = 0; i < values.length; i++) statement.setObject(i + 1, values[i]);
            try (ResultSet row = statement.executeQuery()) {
                T result = row.next() ? reader.read(row) : null;
                idle.push(connection);
                return result;
            }
        } catch (SQLException error) {
            discard(connection);
            discardIdle(); // they may be broken too
            throw error;
        }
    }

    private void discardIdle() {
        for (Connection one = idle.poll(); one != null; one = idle.poll()) discard(one);
    }

    private static void discard(Connection connection) {
        try {
            if (connection != null) connection.close();
        } catch (SQLException error) {
            // It was broken.
        }
    }

    private record Reply(boolean granted, long token, double remaining, boolean ticket) {}

    /** Wait for the lock, at most this long. Return a lease, or null. */
    public Lease acquire(String name, Duration ttl, Duration timeout) throws SQLException, InterruptedException {
        UUID attempt = UUID.randomUUID();
        Semaphore wake = new Semaphore(0);
        waiting.put(attempt.toString(), wake); // before the call, so that no notification is missed
        long giveUp = System.nanoTime() + timeout.toNanos();
        boolean hadTicket = false;
        try {
            while (true) {
                wake.drainPermits();
                long asked = System.nanoTime();
                Reply reply = call(
                    row -> new Reply(row.getBoolean(1), row.getLong(2), row.getDouble(3), row.getObject(4) != null),
                    "SELECT granted, token, remaining, ticket FROM dblock.acquire(?, ttl => make_interval(secs => ?),"
                        + " holder => ?, attempt => ?, client => ?, had_ticket => ?)",
                    name, ttl.toMillis() / 1e3, "java pid " + ProcessHandle.current().pid(), attempt, client, hadTicket);
                if (reply.granted) return new Lease(name, reply.token, ttl, asked, reply.remaining);
                hadTicket |= reply.ticket;
                long left = giveUp - System.nanoTime();
                if (left <= 0) {
                    abandon(name, attempt);
                    return null;
                }
                // Ask again in a second at the latest: the call is also the heartbeat of the ticket.
                long most = (long) (Math.min(1.0, Math.max(reply.remaining, 0.05)) * 1e9);
                wake.tryAcquire(Math.min(left, most), TimeUnit.NANOSECONDS);
            }
        } catch (InterruptedException error) {
            abandon(name, attempt);
            throw error;
        } finally {
            waiting.remove(attempt.toString());
        }
    }

    /** Give the ticket back, and the lock too if it was granted at this moment. */
    private void abandon(String name, UUID attempt) throws SQLException {
        call(row -> null, "SELECT dblock.abandon(?, ?)", name, attempt);
    }

    /** Release all leases, and leave all queues. */
    @Override
    public void close() throws SQLException {
        closing = true;
        try {
            for (Lease lease : leases) lease.release();
            call(row -> null, "SELECT dblock.leave_queue(?)", client);
        } finally {
            renewals.shutdownNow();
            watch.shutdownNow();
            discardIdle();
        }
    }

    /** Held from the grant until release, unless it is lost. */
    public final class Lease {
        public final String name;
        /** The fencing token: pass it to every resource that you write to. */
        public final long token;
        public final CompletableFuture<String> lost = new CompletableFuture<>();
        private final Duration ttl;
        private volatile long trustedUntil;
        private volatile boolean ended;

        private Lease(String name, long token, Duration ttl, long asked, double remaining) {
            this.name = name;
            this.token = token;
            this.ttl = ttl;
            leases.add(this);
            trust(asked, remaining);
            watch();
            renewIn(ttl.dividedBy(3));
        }

        /** Trust the lease for 98 % of what is left, from the moment before the request. */
        private void trust(long asked, double remaining) {
            trustedUntil = asked + (long) (remaining * 0.98 * 1e9);
        }

        /** Return whether the lease is held for certain, at this moment. */
        public boolean isHeld() {
            if (System.nanoTime() - trustedUntil >= 0) lose("it was not renewed in time");
            return !ended;
        }

        /** Lose the lease at the end of its trust window, which renewals move. */
        private void watch() {
            if (isHeld()) watch.schedule(this::watch, trustedUntil - System.nanoTime(), TimeUnit.NANOSECONDS);
        }

        private void lose(String why) {
            if (end()) lost.complete("The lease of " + name + " was lost: " + why + ". Stop writing.");
        }

        private synchronized boolean end() {
            boolean first = !ended;
            ended = true;
            leases.remove(this);
            return first;
        }

        private void renewIn(Duration pause) {
            renewals.schedule(this::renew, pause.toNanos(), TimeUnit.NANOSECONDS);
        }

        private void renew() {
            if (!isHeld()) return;
            long asked = System.nanoTime();
            try {
                Double remaining = call(row -> row.getDouble(1),
                    "SELECT remaining FROM dblock.renew(?, ?, make_interval(secs => ?))", name, token, ttl.toMillis() / 1e3);
                if (remaining == null) {
                    lose("another client may hold the lock");
                } else {
                    trust(asked, remaining);
                    renewIn(ttl.dividedBy(3));
                }
            } catch (SQLException error) {
                renewIn(ttl.dividedBy(20)); // no reply: try again until the end of the trust window
            }
        }

        /** Free the lock and wake the next waiter. False: it was not held under this token any more. */
        public boolean release() throws SQLException {
            end();
            return call(row -> row.getBoolean(1), "SELECT dblock.release(?, ?, durable => false)", name, token);
        }
    }

    private static Thread daemon(Runnable body) {
        Thread thread = new Thread(body);
        thread.setDaemon(true);
        return thread;
    }

    private static void pause(long milliseconds) {
        try {
            Thread.sleep(milliseconds);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }
}
