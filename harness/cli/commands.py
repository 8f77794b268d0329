"""The command words of `harness COMMAND`."""

# Every command word, with the module whose main(arguments) runs it and one line of help.
COMMANDS = {
    "plan": ("harness.cli.plan", "predict memory and time of any layout on any cluster, and search for the best"),
    "calibrate": ("harness.cli.calibrate", "measure this machine into a cluster file for plans and predictions"),
    "status": ("harness.cli.status", "show how far the runs of a comparison are, from any shell"),
    "report": ("harness.cli.report", "print the table of one or several comparisons and write their report"),
    "explain": ("harness.cli.explain", "show what each figure of a run was computed from"),
    "diff": ("harness.cli.diff", "show what changed from one comparison to another"),
    "sync": ("harness.cli.sync", "send to the tracker the runs that it does not have yet"),
    "export": ("harness.cli.export", "write one run's layout as scripts and configuration files for other launchers"),
    "selftest": ("harness.cli.selftest", "show what of this installation works, by real runs on this machine"),
    "completion": ("harness.cli.completion", "print a script that completes commands and settings in your shell"),
    "ls": ("harness.cli.ls", "list the available strategies, models, clusters or sweeps"),
}
