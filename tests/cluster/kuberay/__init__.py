"""KubeRay's part: pods and services of a RayService, and its application on the cluster's dashboard.

pods        pure: the pods, with KubeRay's own commands and variables
services    pure: the services, and the configuration of the application
controller  makes clusters, submits the application, and leads the services to the cluster that runs it
dashboard   a program: one request to the dashboard, from the operator's namespace

Everything is as KubeRay 1.6.2 does it (github.com/ray-project/kuberay at 598eb66). Modules name the files.
"""
