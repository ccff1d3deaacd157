// Contend for a lock with the client of docs/languages, and record a history: Contend HISTORY LOCK STOP TTL
import java.io.File;
import java.io.FileWriter;
import java.io.IOException;
import java.time.Duration;
import java.util.Locale;

public final class Contend {
    private static FileWriter file;
    private static String lock;
    private static int numbers;

    private static double now() {
        return System.nanoTime() / 1e9; // on Linux, the machine's monotonic clock, as Python's
    }

    private static void write(String line, Object... values) throws IOException {
        file.write(String.format(Locale.ROOT, line, values) + "\n");
        file.flush();
    }

    private static int begin(String kind, double at, String details) throws IOException {
        write("{\"id\": %d, \"at\": %.9f, \"kind\": \"%s\", \"key\": \"%s\", \"details\": {%s}}",
            numbers, at, kind, lock, details);
        return numbers++;
    }

    private static void end(int number, String outcome, String details) throws IOException {
        write("{\"id\": %d, \"at\": %.9f, \"outcome\": \"%s\", \"details\": {%s}}", number, now(), outcome, details);
    }

    private static void turn(Dblock locks, double ttl, double hold, double timeout) throws Exception {
        String asked = String.format(Locale.ROOT, "\"ttl\": %f, \"timeout\": %f, \"keep_alive\": true", ttl, timeout);
        int acquiring = begin("acquire", now(), asked);
        Dblock.Lease lease =
            locks.acquire(lock, Duration.ofMillis((long) (ttl * 1000)), Duration.ofMillis((long) (timeout * 1000)));
        if (lease == null) {
            end(acquiring, "failed", "");
            return;
        }
        String token = "\"token\": " + lease.token;
        end(acquiring, "ok", token);
        for (double ends = now() + hold; ; Thread.sleep(5)) {
            double before = now();
            if (!lease.isHeld()) {
                end(begin("loss", now(), token), "ok", "");
                break;
            }
            end(begin("believe", before, token), "ok", "");
            if (now() >= ends) break;
        }
        int releasing = begin("release", now(), token);
        end(releasing, "ok", "\"freed\": " + lease.release());
    }

    public static void main(String[] args) throws Exception {
        file = new FileWriter(args[0], true);
        lock = args[1];
        File stop = new File(args[2]);
        double ttl = Double.parseDouble(args[3]);
        try (Dblock locks = Dblock.open(System.getenv("JDBC_URL"), System.getenv("PGUSER"), System.getenv("PGPASSWORD"))) {
            System.out.println("ready");
            System.in.read();
            for (int number = 1; !stop.exists(); number++) {
                // Every tenth wait may end before its turn, and one of forty holds outlasts a lease without renewals.
                double hold = number % 40 == 10 ? ttl * 1.3 : Math.random() * 0.01;
                turn(locks, ttl, hold, number % 10 == 5 ? 0.02 : 30);
            }
        }
    }
}
