"""Report the runs for people: a page of Markdown, with pictures of holders and of latencies."""
