"""The code that runs in every rank."""
