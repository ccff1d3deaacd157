"""What came of the runs, for people: a page of Markdown, with pictures of who held what and how long others waited."""
