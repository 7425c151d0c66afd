"""Shared by the stories: cluster, installation, jobs, figures."""
