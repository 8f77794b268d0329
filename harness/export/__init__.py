"""Export of a recorded run: its layout for other launchers and libraries, and as a short training script.

A file is written only if it trains as the run did. Where a format cannot express that, the reason is printed instead.
"""
