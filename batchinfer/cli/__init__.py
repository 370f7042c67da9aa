"""The command line below the commands: the click group, options, settings files and logs."""
