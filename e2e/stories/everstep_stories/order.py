"""The order of the stories, and which of them are core."""

CORE = (
    "install",
    "completion",
    "gpu_that_still_computes",
    "gpu_off_the_bus",
    "pod_deleted",
    "node_drained",
    "operator_killed",
    "object_store_away",
    "container_out_of_memory",
    "rank_stopped",
)
FURTHER = (
    "notice_of_ten_seconds",
    "rank_out_of_memory",
    "all_containers_out_of_memory",
    "object_store_fails",
    "denials",
    "operator_upgraded",
    "api_server_stopped",
    "coordinator_killed",
    "suspended_edited_resumed",
    "two_jobs",
    "namespace_deleted",
    "wrong_image",
    "kubelet_stopped",
    "partition",
    "elastic",
    "every_sample_once",
    "node_power_lost",
    "node_power_lost_with_spare",
    "two_nodes_power_lost",
    "unit_lost",
    "only_unit_lost",
    "llama",
    "uninstall",
    "documents",
)


def place_of(story: str) -> int:
    """The position of the story in the order. Raises LookupError if it is not there."""
    stories = CORE + FURTHER
    if story not in stories:
        raise LookupError(
            f"test_{story}.py is not in the order: add it to everstep_stories/order.py"
        )
    return stories.index(story)
