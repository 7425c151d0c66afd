"""The operator's cost with many jobs and nodes, on a real control plane; nodes and pods have no kubelet."""
