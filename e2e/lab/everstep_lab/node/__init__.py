"""Simulated GPU nodes: their Kubernetes objects and processes are real, their GPUs are not."""

from everstep_lab.node.node import SimulatedNode as SimulatedNode
