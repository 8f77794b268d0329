"""The measured columns of a finished run, computed from the reports of its ranks."""
