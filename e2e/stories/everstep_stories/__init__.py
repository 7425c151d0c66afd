"""What the stories share: the cluster, the installation, the jobs, the telling."""
