"""What `dblock watch` is made of: looks at the database, what they show, and how it is drawn."""
