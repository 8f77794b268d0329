"""The command words of `harness COMMAND`."""

# Every command word, with the module whose main(arguments) runs it and one line of help.
COMMANDS = {
    "status": ("harness.cli.status", "show how far the runs of a comparison are, from any shell"),
    "report": ("harness.cli.report", "print the table of one or several comparisons and write their report"),
    "diff": ("harness.cli.diff", "show what changed from one comparison to another"),
    "sync": ("harness.cli.sync", "send to the tracker the runs that it does not have yet"),
    "export": ("harness.cli.export", "write one run's layout as scripts and configuration files for other launchers"),
    "ls": ("harness.cli.ls", "list the available strategies, models, clusters or sweeps"),
}
