"""The same for a job that runs already: two commands. Read job.py first."""
