"""The rendered chart, run without a cluster: `make cluster`, or `python -m tests.cluster --help`.

__main__            isolates everything, and proves that nothing is left
story, pairs        what is tried, in order
installation        the objects, and the controllers that act on them
services            endpoints and names
kuberay             pods and services of a RayService, and its application
pod, container      a node: pods, their containers and probes
network, gateway    namespaces, bridge and rules; Envoy
pod_plan, firewall, gateway_config, rolling_update, images
                    pure: what the objects mean
"""
