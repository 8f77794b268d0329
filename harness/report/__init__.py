"""The report of a comparison from its recorded files alone: a table in the terminal, a page in Markdown and in HTML."""
