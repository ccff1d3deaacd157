"""Who waits for whom: found out without a database at hand, and drawn as text, Mermaid, DOT or SVG."""
