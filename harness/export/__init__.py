"""The configuration of a recorded run to take home: for other launchers and libraries, and as a short script.

A file is written only where it trains as the run did; where a format cannot say that, the reason is said instead.
"""
