"""The timeline of `dblock demo`: computed from the events, drawn as text or SVG."""
