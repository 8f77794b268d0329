"""The proof of a finished run: its layout, the work of its steps, and what it trained."""
