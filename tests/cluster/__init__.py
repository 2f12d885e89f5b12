"""The rendered chart, run without a cluster: `make cluster`, or `python -m tests.cluster --help`.

__main__            isolates everything, and proves that nothing is left
story               what is tried, in order
installation        the objects, and the controllers that act on them
pod, container      a node: pods, their containers and probes
network, gateway    namespaces, bridge and rules; Envoy
pod_plan, firewall, gateway_config, rolling_update, images
                    pure: what the objects mean
"""
