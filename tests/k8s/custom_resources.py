"""Schemas of the custom resources that are used, with unknown fields refused.

Written down from the resources' own definitions as far as our manifests go; a field that is not here is looked up there
and added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jsonschema
import kubernetes_validate

KUBERNETES_VERSION: Final = "1.33"
Schema = Mapping[str, Any]

TEXT: Final[Schema] = {"type": "string"}
DURATION: Final[Schema] = {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
FLAG: Final[Schema] = {"type": "boolean"}
POD: Final[Schema] = {"type": "object"}  # checked as a pod


def _object(properties: Mapping[str, Schema], *required: str) -> Schema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": dict(items)}


_WORDS: Final[Schema] = {"type": "object", "additionalProperties": TEXT}
_METADATA: Final = _object({"name": TEXT, "namespace": TEXT, "labels": _WORDS, "annotations": _WORDS}, "name")
_TEMPLATE: Final = _object({"metadata": _object({"labels": _WORDS, "annotations": _WORDS}), "spec": POD}, "spec")
_PORT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65535}
# https://gateway-api.sigs.k8s.io/reference/spec/, as of v1.3
_HOST: Final[Schema] = {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
_DURATION: Final[Schema] = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_BACKENDS: Final = _array(_object({"name": TEXT, "port": _PORT, "weight": COUNT}, "name", "port"))
_PARENTS: Final = {
    "parentRefs": _array(_object({"name": TEXT, "namespace": TEXT, "sectionName": TEXT}, "name")),
    "hostnames": _array(_HOST),
}
_NUMBER_TEXT: Final[Schema] = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}
_RULES: Final = _object(
    {
        "stabilizationWindowSeconds": COUNT,
        "selectPolicy": {"enum": ["Max", "Min", "Disabled"]},
        "policies": _array(
            _object(
                {"type": {"enum": ["Pods", "Percent"]}, "value": COUNT, "periodSeconds": COUNT},
                "type",
                "value",
            )
        ),
    }
)
_GROUP: Final = {"rayStartParams": _WORDS, "template": POD}
_SELECTOR: Final = _object({"matchLabels": _WORDS})
_SECRET_KEY: Final = _object({"name": TEXT, "key": TEXT}, "name", "key")
_RELABELING: Final = _object(
    {
        "action": {"enum": ["replace", "keep", "drop", "labelmap"]},
        "sourceLabels": _array(TEXT),
        "regex": TEXT,
        "targetLabel": TEXT,
        "replacement": TEXT,
    }
)
_SCRAPE_TLS: Final = _object(
    {
        "serverName": TEXT,
        "ca": _object({"secret": _SECRET_KEY}, "secret"),
        "cert": _object({"secret": _SECRET_KEY}, "secret"),
        "keySecret": _SECRET_KEY,
    }
)
_RULE: Final = {"expr": TEXT, "labels": _WORDS}

SPECS: Final[Mapping[str, Schema]] = {
    # https://docs.ray.io/en/latest/cluster/kubernetes/references.html
    "ray.io/v1/RayService": _object(
        {
            "excludeHeadPodFromServeSvc": FLAG,
            "upgradeStrategy": _object({"type": {"enum": ["NewCluster", "None", "NewClusterWithIncrementalUpgrade"]}}),
            "rayClusterDeletionDelaySeconds": COUNT,
            "serveConfigV2": TEXT,
            "serveService": _object(
                {"spec": _object({"ports": _array(_object({"name": TEXT, "port": _PORT, "appProtocol": TEXT}))})}
            ),
            "rayClusterConfig": _object(
                {
                    "rayVersion": TEXT,
                    "authOptions": _object({"mode": {"enum": ["disabled", "token"]}}, "mode"),
                    "gcsFaultToleranceOptions": _object(
                        {
                            "redisAddress": TEXT,
                            "redisPassword": _object(
                                {"valueFrom": _object({"secretKeyRef": _SECRET_KEY}, "secretKeyRef")},
                                "valueFrom",
                            ),
                            "externalStorageNamespace": TEXT,
                        },
                        "redisAddress",
                    ),
                    "headGroupSpec": _object(_GROUP, "template"),
                    "workerGroupSpecs": _array(
                        _object(
                            _GROUP
                            | {
                                "groupName": TEXT,
                                "replicas": COUNT,
                                "minReplicas": COUNT,
                                "maxReplicas": COUNT,
                            },
                            *("groupName", "template"),
                        )
                    ),
                },
                "headGroupSpec",
            ),
        },
        *("serveConfigV2", "rayClusterConfig"),
    ),
    # https://cert-manager.io/docs/reference/api-docs/, as of v1.18
    "cert-manager.io/v1/Issuer": {
        "oneOf": [
            _object({"selfSigned": _object({})}, "selfSigned"),
            _object({"ca": _object({"secretName": TEXT}, "secretName")}, "ca"),
        ]
    },
    "cert-manager.io/v1/Certificate": _object(
        {
            "secretName": TEXT,
            "commonName": TEXT,
            "isCA": FLAG,
            "dnsNames": _array(_HOST),
            "duration": _DURATION,
            "renewBefore": _DURATION,
            "usages": _array(
                {
                    "enum": [
                        "signing",
                        "digital signature",
                        "key encipherment",
                        "server auth",
                        "client auth",
                        "cert sign",
                    ]
                }
            ),
            "privateKey": _object(
                {
                    "algorithm": {"enum": ["RSA", "ECDSA", "Ed25519"]},
                    "size": COUNT,
                    "rotationPolicy": {"enum": ["Never", "Always"]},
                }
            ),
            "issuerRef": _object({"kind": {"enum": ["Issuer", "ClusterIssuer"]}, "name": TEXT}, "name"),
        },
        *("secretName", "issuerRef"),
    ),
    # https://keda.sh/docs/2.17/reference/scaledobject-spec/
    "keda.sh/v1alpha1/ScaledObject": _object(
        {
            "scaleTargetRef": _object({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}, "name"),
            "pollingInterval": COUNT,
            "cooldownPeriod": COUNT,
            "minReplicaCount": COUNT,
            "maxReplicaCount": COUNT,
            "fallback": _object(
                {
                    "failureThreshold": COUNT,
                    "replicas": COUNT,
                    "behavior": {
                        "enum": [
                            "static",
                            "currentReplicas",
                            "currentReplicasIfHigher",
                            "currentReplicasIfLower",
                        ]
                    },
                },
                *("failureThreshold", "replicas"),
            ),
            "advanced": _object(
                {
                    "horizontalPodAutoscalerConfig": _object(
                        {"behavior": _object({"scaleUp": _RULES, "scaleDown": _RULES})}
                    )
                }
            ),
            "triggers": _array(
                _object(
                    {
                        "type": {"const": "prometheus"},
                        "name": TEXT,
                        "metricType": {"enum": ["AverageValue", "Value"]},
                        "metadata": _object(
                            {
                                "serverAddress": TEXT,
                                "query": TEXT,
                                "threshold": _NUMBER_TEXT,
                                "activationThreshold": _NUMBER_TEXT,
                                "ignoreNullValues": {"enum": ["true", "false"]},
                            },
                            *("serverAddress", "query", "threshold"),
                        ),
                    },
                    *("type", "metadata"),
                )
            ),
        },
        *("scaleTargetRef", "triggers"),
    ),
    # https://prometheus-operator.dev/docs/api-reference/api/
    "monitoring.coreos.com/v1/PodMonitor": _object(
        {
            "selector": _SELECTOR,
            "podMetricsEndpoints": _array(
                _object(
                    {
                        "port": TEXT,
                        "path": TEXT,
                        "scheme": {"enum": ["http", "https"]},
                        "interval": DURATION,
                        "scrapeTimeout": DURATION,
                        "relabelings": _array(_RELABELING),
                        "tlsConfig": _SCRAPE_TLS,
                    },
                    "port",
                )
            ),
        },
        *("selector", "podMetricsEndpoints"),
    ),
    "monitoring.coreos.com/v1/PrometheusRule": _object(
        {
            "groups": _array(
                _object(
                    {
                        "name": TEXT,
                        "interval": DURATION,
                        "rules": _array(
                            {
                                "oneOf": [
                                    _object(_RULE | {"record": TEXT}, "record", "expr"),
                                    _object(
                                        _RULE | {"alert": TEXT, "for": DURATION, "annotations": _WORDS},
                                        *("alert", "expr", "labels", "annotations"),
                                    ),
                                ]
                            }
                        ),
                    },
                    *("name", "rules"),
                )
            )
        },
        "groups",
    ),
    # https://github.com/kubernetes-sigs/lws/blob/main/api/leaderworkerset/v1/leaderworkerset_types.go
    "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet": _object(
        {
            "replicas": COUNT,
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
            "networkConfig": _object({"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}, "subdomainPolicy"),
            "rolloutStrategy": _object(
                {
                    "type": {"enum": ["RollingUpdate"]},
                    "rollingUpdateConfiguration": _object(
                        {"partition": COUNT, "maxSurge": COUNT, "maxUnavailable": COUNT}
                    ),
                },
                "type",
            ),
            "leaderWorkerTemplate": _object(
                {
                    "size": {"type": "integer", "minimum": 1},
                    "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                    "leaderTemplate": _TEMPLATE,
                    "workerTemplate": _TEMPLATE,
                },
                "workerTemplate",
            ),
        },
        "leaderWorkerTemplate",
    ),
    "gateway.networking.k8s.io/v1/Gateway": _object(
        {
            "gatewayClassName": TEXT,
            "listeners": _array(
                _object(
                    {
                        "name": TEXT,
                        "protocol": {"enum": ["HTTP", "HTTPS", "TLS", "TCP", "UDP"]},
                        "port": _PORT,
                        "hostname": _HOST,
                        "tls": _object(
                            {
                                "mode": {"enum": ["Terminate", "Passthrough"]},
                                "certificateRefs": _array(_object({"kind": {"const": "Secret"}, "name": TEXT}, "name")),
                            }
                        ),
                        "allowedRoutes": _object(
                            {
                                "kinds": _array(_object({"group": TEXT, "kind": TEXT}, "kind")),
                                "namespaces": _object({"from": {"enum": ["All", "Selector", "Same"]}}),
                            }
                        ),
                    },
                    *("name", "protocol", "port"),
                )
            ),
        },
        *("gatewayClassName", "listeners"),
    ),
    "gateway.networking.k8s.io/v1/HTTPRoute": _object(
        _PARENTS
        | {
            "rules": _array(
                _object(
                    {
                        "matches": _array(
                            _object(
                                {
                                    "method": {"enum": ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]},
                                    "path": _object(
                                        {
                                            "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                            "value": {"type": "string", "pattern": "^/"},
                                        }
                                    ),
                                }
                            )
                        ),
                        "timeouts": _object({"request": _DURATION, "backendRequest": _DURATION}),
                        "backendRefs": _BACKENDS,
                    }
                )
            )
        }
    ),
    "gateway.networking.k8s.io/v1/GRPCRoute": _object(
        _PARENTS
        | {
            "rules": _array(
                _object(
                    {
                        "matches": _array(
                            _object(
                                {
                                    "method": _object(
                                        {
                                            "type": {"enum": ["Exact", "RegularExpression"]},
                                            "service": TEXT,
                                            "method": TEXT,
                                        }
                                    )
                                }
                            )
                        ),
                        "backendRefs": _BACKENDS,
                    }
                )
            )
        }
    ),
}


def check_custom_resource(resource: Mapping[str, Any]) -> None:
    """Raises AssertionError for a kind that is not known, or a field that it does not have."""
    kind = f"{resource['apiVersion']}/{resource['kind']}"
    assert kind in SPECS, f"there is no schema of {kind}"
    schema = _object({"apiVersion": TEXT, "kind": TEXT, "metadata": _METADATA, "spec": SPECS[kind]}, "metadata", "spec")
    errors = [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(resource)
    ]
    assert not errors, f"{kind} {resource['metadata']['name']}: {errors}"
    for template in _pod_templates(resource):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)


def _pod_templates(resource: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if resource["kind"] == "LeaderWorkerSet":
        group = resource["spec"]["leaderWorkerTemplate"]
        return [group[kind] for kind in ("leaderTemplate", "workerTemplate") if kind in group]
    if resource["kind"] != "RayService":
        return []
    cluster = resource["spec"]["rayClusterConfig"]
    return [
        cluster["headGroupSpec"]["template"],
        *(group["template"] for group in cluster["workerGroupSpecs"]),
    ]
