"""Processes of ranks.

workers.py        run ranks in worker processes, a few at a time, with a bar for each
rank_template.py  a process that has imported what all ranks import, and forks one for each
rank_server.py    the code of that process
"""
