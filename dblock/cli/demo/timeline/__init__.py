"""Who held a lock when, and what came of it: worked out from events, and drawn as text or SVG."""
