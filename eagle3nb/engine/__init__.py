"""What runs in child processes: everything that loads vLLM or trains. Nothing imports these modules.

Each is started as ``python -m eagle3nb.engine.<name> JOB.json``; the job file holds all it needs, its standard
output and error are its log, ``progress.json`` beside the job file its progress, ``done.json`` its last word.
"""
