"""`dblock graph`: the wait-for graph, built without a database, drawn as text, Mermaid, DOT or SVG."""
