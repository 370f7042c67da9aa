"""What all commands of the command line share: the click group, options, settings files and logs."""
