"""The command line: one file for each verb, none of them imported before its verb is asked for."""
