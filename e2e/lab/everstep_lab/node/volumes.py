"""A pod's volumes as folders: which kinds the lab supports, and their content."""

import base64
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep_lab.node.environment import Place, Sources, field_value, resource_value
from everstep_lab.node.errors import ConfigError, NotSimulatedError

Object = Mapping[str, Any]
KINDS = ("emptyDir", "configMap", "secret", "downwardAPI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """The folders of a pod, or of a node, on this machine."""

    disk: Path
    memory: Path

    def volume(self, volume: Object) -> Path:
        in_memory = (volume.get("emptyDir") or {}).get("medium") == "Memory"
        return (self.memory if in_memory else self.disk) / "volumes" / str(volume["name"])


def check_pod(spec: Object) -> None:
    """Raise `NotSimulatedError`, with a message for the pod's author, if the lab cannot run it."""
    for volume in spec.get("volumes") or []:
        if not is_token(volume):
            _check_volume(volume)
    for field, what in (("hostNetwork", "hostNetwork"), ("hostPID", "hostPID")):
        if spec.get(field):
            raise NotSimulatedError(f"the lab does not simulate {what}; remove it from the pod")
    if spec.get("initContainers"):
        raise NotSimulatedError(
            "the lab does not simulate initContainers; move their work into the command"
        )
    for container in spec["containers"]:
        _check_container(container)


def _check_volume(volume: Object) -> None:
    kind = next((key for key in volume if key != "name"), "emptyDir")
    if kind not in KINDS:
        raise NotSimulatedError(
            f'the lab does not simulate {kind} volumes (volume "{volume["name"]}"); '
            f"it has {', '.join(KINDS[:-1])} and {KINDS[-1]}"
        )


def _check_container(container: Object) -> None:
    if container.get("lifecycle"):
        raise NotSimulatedError(
            f'the lab does not simulate lifecycle hooks (container "{container["name"]}")'
        )
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(name)
        if probe and not ("httpGet" in probe or "tcpSocket" in probe):
            raise NotSimulatedError(
                f'the lab probes with httpGet and tcpSocket only ({name} of "{container["name"]}")'
            )


def is_token(volume: Object) -> bool:
    """Whether this is the token volume that the API server adds to a pod. Here it stays empty."""
    return volume["name"].startswith("kube-api-access-") and "projected" in volume


def list_references(spec: Object) -> tuple[set[str], set[str]]:
    """Names of the ConfigMaps and of the Secrets that the pod uses, including optional ones."""
    maps: set[str] = set()
    secrets: set[str] = set()
    for volume in spec.get("volumes") or []:
        if "configMap" in volume:
            maps.add(volume["configMap"]["name"])
        if "secret" in volume:
            secrets.add(volume["secret"]["secretName"])
    for container in spec["containers"]:
        for source in [*(container.get("envFrom") or []), *_value_sources(container)]:
            for field, names in (("configMap", maps), ("secret", secrets)):
                for suffix in ("Ref", "KeyRef"):
                    if field + suffix in source:
                        names.add(source[field + suffix]["name"])
    return maps, secrets


def _value_sources(container: Object) -> Iterable[Object]:
    return (entry["valueFrom"] for entry in container.get("env") or [] if "valueFrom" in entry)


def decode_content(kind: str, document: Object) -> dict[str, bytes]:
    """Decode the `data` of a ConfigMap or a Secret (base64), and a ConfigMap's `binaryData`."""
    plain = document.get("data") or {}
    if kind == "Secret":
        return {key: base64.b64decode(value) for key, value in plain.items()}
    content = {key: value.encode() for key, value in plain.items()}
    for key, value in (document.get("binaryData") or {}).items():
        content[key] = base64.b64decode(value)
    return content


def apply_volumes(pod: Object, sources: Sources, place: Place, folders: Folders) -> None:
    """Create the volumes' folders and files. Later changes of their sources are ignored."""
    for volume in pod["spec"].get("volumes") or []:
        path = folders.volume(volume)
        path.mkdir(parents=True, exist_ok=True)
        for name, content in build_files(volume, pod, sources, place).items():
            target = path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def build_files(volume: Object, pod: Object, sources: Sources, place: Place) -> dict[str, bytes]:
    """A volume's files: relative path → content.

    Raises `ConfigError` if a required ConfigMap, Secret or key is missing.
    """
    if "configMap" in volume:
        source = volume["configMap"]
        return _keyed(source, "configmap", source["name"], sources.config_maps)
    if "secret" in volume:
        source = volume["secret"]
        return _keyed(source, "secret", source["secretName"], sources.secrets)
    if "downwardAPI" in volume:
        items = volume["downwardAPI"].get("items") or []
        return {item["path"]: _downward(item, pod, place).encode() for item in items}
    return {}


def _keyed(
    source: Object, kind: str, name: str, known: Mapping[str, Mapping[str, bytes]]
) -> dict[str, bytes]:
    if name not in known:
        if source.get("optional"):
            return {}
        raise ConfigError(f'{kind} "{name}" not found')
    content = known[name]
    items = source.get("items")
    if not items:
        return dict(content)
    missing = [item["key"] for item in items if item["key"] not in content]
    if missing and not source.get("optional"):
        raise ConfigError(f'{kind} "{name}" has no key {missing[0]!r}')
    return {item["path"]: content[item["key"]] for item in items if item["key"] in content}


def _downward(item: Object, pod: Object, place: Place) -> str:
    if "fieldRef" in item:
        return field_value(item["fieldRef"]["fieldPath"], pod, place)
    reference = item["resourceFieldRef"]
    container = next(
        c for c in pod["spec"]["containers"] if c["name"] == reference["containerName"]
    )
    return resource_value(reference, container)


def map_mounts(pod: Object, container: Object, folders: Folders) -> dict[str, str]:
    """Map each mount path to a folder on this machine, for `rewrite.Paths`."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
    mapping = {}
    for mount in container.get("volumeMounts") or []:
        host = folders.volume(volumes[mount["name"]])
        if mount.get("subPath"):
            host = host / mount["subPath"]
            host.parent.mkdir(parents=True, exist_ok=True)
        mapping[mount["mountPath"]] = os.fspath(host)
    return mapping


def delete_folders(folders: Folders) -> None:
    for path in (folders.disk, folders.memory):
        shutil.rmtree(path, ignore_errors=True)
