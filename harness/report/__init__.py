"""The comparison shown from recorded files alone: a table in the terminal, a page in Markdown."""
