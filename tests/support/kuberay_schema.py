"""RayCluster's schema: KubeRay's own keys, after its API reference (ray.io/v1).

What is Kubernetes' in it (pods, services, resources) is by Kubernetes' own schema, and as strict.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import jsonschema
import kubernetes_validate
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

if TYPE_CHECKING:
    from collections.abc import Mapping

KUBERNETES = "1.34"  # the oldest that is still served; the schemas are of this version
_CORE = "k8s#/$defs/io.k8s.api.core.v1."
_META = "k8s#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1."
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_FLAG = {"type": "boolean"}
_TEXT = {"type": "string"}


def _keys(required: tuple[str, ...] = (), **properties: object) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _core(name: str) -> dict[str, str]:
    return {"$ref": _CORE + name}


_SERVICE = _keys(  # the operator fills in what is not said, apiVersion and kind included
    metadata={"$ref": _META + "ObjectMeta"}, spec=_core("ServiceSpec")
)
_HEAD = _keys(
    ("rayStartParams", "template"),
    enableIngress=_FLAG,
    headService=_SERVICE,
    rayStartParams=_TEXTS,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    template=_core("PodTemplateSpec"),
)
_WORKERS = _keys(
    ("groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"),
    groupName=_TEXT,
    idleTimeoutSeconds=_COUNT,
    maxReplicas=_COUNT,
    minReplicas=_COUNT,
    numOfHosts=_COUNT,
    rayStartParams=_TEXTS,
    replicas=_COUNT,
    scaleStrategy=_keys(workersToDelete={"type": "array", "items": _TEXT}),
    suspend=_FLAG,
    template=_core("PodTemplateSpec"),
)
_AUTOSCALER = _keys(
    env={"type": "array", "items": _core("EnvVar")},
    envFrom={"type": "array", "items": _core("EnvFromSource")},
    idleTimeoutSeconds=_COUNT,
    image=_TEXT,
    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    resources=_core("ResourceRequirements"),
    securityContext=_core("SecurityContext"),
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    version={"enum": ["v1", "v2"]},
    volumeMounts={"type": "array", "items": _core("VolumeMount")},
)
RAY_CLUSTER = _keys(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata={"$ref": _META + "ObjectMeta"},
    spec=_keys(
        ("headGroupSpec",),
        autoscalerOptions=_AUTOSCALER,
        enableInTreeAutoscaling=_FLAG,
        headGroupSpec=_HEAD,
        headServiceAnnotations=_TEXTS,
        managedBy=_TEXT,
        rayVersion=_TEXT,
        suspend=_FLAG,
        workerGroupSpecs={"type": "array", "items": _WORKERS},
    ),
)
KUSTOMIZATION = _keys(
    ("apiVersion", "kind", "resources"),
    apiVersion={"const": "kustomize.config.k8s.io/v1beta1"},
    kind={"const": "Kustomization"},
    resources={"type": "array", "items": _TEXT},
)


def problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a document by its kind's schema: path and sentence; unknown keys too."""
    own = {"RayCluster": RAY_CLUSTER, "Kustomization": KUSTOMIZATION}.get(document["kind"])
    if own is None:
        try:
            kubernetes_validate.validate(dict(document), KUBERNETES, strict=True)
        except jsonschema.ValidationError as error:
            return [_line(error)]
        return []
    validator = jsonschema.Draft202012Validator(own, registry=_registry())
    return sorted(_line(error) for error in validator.iter_errors(document))


@cache
def _registry() -> Registry[Any]:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    named = f"v{KUBERNETES}.0-local-strict"
    text = (folder / named / "_definitions.json").read_text()
    return Registry().with_resource("k8s", Resource(json.loads(text), DRAFT202012))


def _line(error: jsonschema.ValidationError) -> str:
    return f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"
