// Use the client of docs/languages as each line of standard input says: one word, then its arguments, between tabs.
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.sql.SQLException;
import java.time.Duration;
import java.nio.charset.StandardCharsets;

public final class Converse {
    private static Dblock.Lease lease;

    private static Duration seconds(String text) {
        return Duration.ofMillis((long) (Double.parseDouble(text) * 1000));
    }

    private static String answer(Dblock locks, String[] words) throws InterruptedException {
        try {
            switch (words[0]) {
                case "acquire" -> {
                    Dblock.Lease mine = locks.acquire(words[1], seconds(words[2]), seconds(words[3]));
                    if (mine == null) return "busy";
                    mine.lost.thenRun(() -> System.out.println("lost"));
                    lease = mine;
                    return "granted " + mine.token;
                }
                case "held" -> { return "" + lease.isHeld(); }
                default -> { return "" + lease.release(); }
            }
        } catch (SQLException error) {
            return "failed " + error.getMessage().replace("\n", " ");
        }
    }

    public static void main(String[] args) throws Exception {
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        try (Dblock locks = Dblock.open(System.getenv("JDBC_URL"), System.getenv("PGUSER"), System.getenv("PGPASSWORD"))) {
            System.out.println("ready");
            for (String line = lines.readLine(); line != null; line = lines.readLine())
                System.out.println(answer(locks, line.split("\t")));
        }
    }
}
