"""Runs as jobs of Ray: its queue, the driver of a job, and the program of a job on each of its nodes."""

NODE_LOST = 75  # the exit status of a driver that lost its leader: EX_TEMPFAIL of sysexits.h, which the harness has not
