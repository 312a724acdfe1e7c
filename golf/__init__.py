"""The tool for people who submit: reads logs, JSON and record folders; `python -m golf --help` lists the commands."""
