"""Directories, files, costs, progress, processes and tracking of runs."""
