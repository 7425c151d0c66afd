"""What the operator costs with many jobs and nodes: a real control plane, nodes and pods without a kubelet."""
