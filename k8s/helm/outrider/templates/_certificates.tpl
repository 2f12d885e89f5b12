{{/* How this installation is closed, as JSON: issuer of its certificates (job, cert-manager, or none) and hasPolicies. What is
`auto` is closed in a new release; an upgrade keeps what the release had, which is in the config map NAME-security, because pods
with certificates and pods without do not understand each other. Without it the release's workloads show what it has. The result is
kept in the values, since every lookup asks the API server. */}}
{{- define "outrider.closed" -}}
{{- if not (hasKey .Values.tls "_closed") }}
{{- $earlier := dict "isNew" true }}
{{- if .Release.IsUpgrade }}
{{- $earlier = (lookup "v1" "ConfigMap" .Release.Namespace (printf "%s-security" (include "outrider.fullname" .)) | default dict).data }}
{{- if not $earlier }}{{ $earlier = include "outrider.closed.seen" . | fromJson }}{{ end }}
{{- end }}
{{- $isNew := get $earlier "isNew" | default false }}
{{- $issuer := get $earlier "issuer" | default "none" }}
{{- $asked := toString .Values.tls.enabled }}
{{- $isOn := or (eq $asked "true") (and (eq $asked "auto") (not .Values.attach.tlsSecret) (or $isNew (ne $issuer "none"))) }}
{{- if not $isOn }}{{ $issuer = "none" }}
{{- else if .Values.tls.issuer }}{{ $issuer = .Values.tls.issuer }}
{{- else if eq $issuer "none" }}{{ $issuer = ternary "job" "cert-manager" (eq $asked "auto") }}
{{- end }}
{{- $policies := toString .Values.networkPolicy.enabled }}
{{- $hasPolicies := or (eq $policies "true") (and (eq $policies "auto") (or $isNew (eq (get $earlier "networkPolicies") "true"))) }}
{{- $_ := set .Values.tls "_closed" (dict "issuer" $issuer "hasPolicies" $hasPolicies) }}
{{- end }}
{{- toJson .Values.tls._closed }}
{{- end }}

{{/* The same of a release that has no config map NAME-security, as JSON: isNew, or issuer and networkPolicies. It is new if none of
its services is there, which Helm makes after config maps: its first installation failed before. Else it is a release of an older
chart, or the config map is lost; its Deployments name the certificates that they have. Fails where it cannot tell. */}}
{{- define "outrider.closed.seen" -}}
{{- $fullname := include "outrider.fullname" . }}
{{- $ours := dict "app.kubernetes.io/part-of" .Chart.Name "app.kubernetes.io/instance" .Release.Name | toJson }}
{{- $isNew := true }}
{{- $issuer := "" }}
{{- range concat ((lookup "v1" "Service" .Release.Namespace "").items | default list) ((lookup "apps/v1" "Deployment" .Release.Namespace "").items | default list) }}
{{- if eq $ours (pick (.metadata.labels | default dict) "app.kubernetes.io/part-of" "app.kubernetes.io/instance" | toJson) }}
{{- $isNew = false }}
{{- if eq .kind "Deployment" }}{{ $issuer = $issuer | default "none" }}{{ end }}
{{- range dig "spec" "template" "spec" "volumes" list . }}
{{- if and (eq .name "tls") (hasPrefix (printf "%s-" $fullname) (dig "secret" "secretName" "" .)) }}
{{- $issuer = ternary "job" "cert-manager" (hasKey .secret "items") }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $hasPolicies := not (empty (lookup "networking.k8s.io/v1" "NetworkPolicy" .Release.Namespace (printf "%s-nothing-by-default" $fullname))) }}
{{- /* Charts whose Job makes certificates are closed unless told otherwise; where nothing can be seen, nothing is opened. */}}
{{- $unknown := list }}
{{- if and (not $isNew) (not $issuer) (eq (toString .Values.tls.enabled) "auto") (not .Values.attach.tlsSecret) }}
{{- $unknown = append $unknown "tls.enabled (true or false; with true also tls.issuer: job or cert-manager)" }}
{{- end }}
{{- if and (not $isNew) (not $hasPolicies) (has $issuer (list "" "job")) (eq (toString .Values.networkPolicy.enabled) "auto") }}
{{- $unknown = append $unknown "networkPolicy.enabled (true or false)" }}
{{- end }}
{{- if $unknown }}
{{- fail (printf "the config map %s-security is missing, which says how this release is closed, and its objects do not show it. Set %s to what the release had, or restore the config map (docs/operations/upgrades.md, Close an open installation)." $fullname (join " and " $unknown)) }}
{{- end }}
{{- toJson (dict "isNew" $isNew "issuer" $issuer "networkPolicies" (toString $hasPolicies)) }}
{{- end }}

{{- define "outrider.tls.issuer" -}}{{ (include "outrider.closed" . | fromJson).issuer }}{{- end }}

{{- define "outrider.hasPolicies" -}}{{ (include "outrider.closed" . | fromJson).hasPolicies }}{{- end }}

{{/* The parts that have a certificate each, as JSON. Prometheus and operators with grpcurl use the operator's for health,
reflection, GetInfo and metrics of workers; an engine that others run has one for drafts that attach to it. */}}
{{- define "outrider.tls.parts" -}}
{{- $parts := ternary (list "engine" "draft" "operator") (list "coordinator" "target" "draft" "operator") .Values.attach.enabled }}
{{- if eq (include "outrider.hasRedis" .) "true" }}{{ $parts = append $parts "redis" }}{{ end }}
{{- toJson $parts }}
{{- end }}

{{/* The volume with the certificate of a part, as an entry of `volumes`. It names the files that the job writes, so that pods wait
for them; cert-manager makes the secret with them. Takes root and role. */}}
{{- define "outrider.tls.volume" -}}
- name: tls
  secret:
    secretName: {{ include "outrider.tls.secret" . }}
    defaultMode: 0440
    {{- if eq (include "outrider.tls.issuer" .root) "job" }}
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}, {key: ca.crt, path: ca.crt}]
    {{- end }}
{{- end }}

{{/* The secret with the certificate of a part. Takes root and role. */}}
{{- define "outrider.tls.secret" -}}
{{- .root.Values.attach.tlsSecret | default (printf "%s-%s-tls" (include "outrider.fullname" .root) .role) }}
{{- end }}

{{/* Whether processes have certificates: those that are made for the release, or those of a secret. */}}
{{- define "outrider.hasTls" -}}
{{ or (ne (include "outrider.tls.issuer" .) "none") (not (empty .Values.attach.tlsSecret)) }}
{{- end }}

{{/* The pod that makes and renews certificates. */}}
{{- define "outrider.certificates.pod" -}}
metadata:
  labels:
    {{- include "outrider.labels" . | nindent 4 }}
    {{- include "outrider.selector" (dict "root" . "component" "certificates") | nindent 4 }}
spec:
  {{- include "outrider.pod.common" (dict "root" . "account" "certificates" "callsApi" true) | nindent 2 }}
  restartPolicy: OnFailure
  securityContext: {{- include "outrider.pod.security" (dict "user" 10001) | nindent 4 }}
  containers:
    - name: certificates
      image: {{ include "outrider.coordinator.image" . }}
      imagePullPolicy: {{ .Values.images.pullPolicy }}
      args: [command_line.certificates.cluster, {{ include "outrider.fullname" . }}, {{ join ", " (include "outrider.tls.parts" . | fromJsonArray) }}]
      resources:
        requests: {cpu: 100m, memory: 64Mi}
        limits: {memory: 256Mi}
      securityContext: {{- include "outrider.container.security" nil | nindent 8 }}
      volumeMounts:
        - {name: scratch, mountPath: /tmp}
  volumes:
    - name: scratch
      emptyDir: {medium: Memory, sizeLimit: 1Mi}  # the authority's key is on no disk
{{- end }}
