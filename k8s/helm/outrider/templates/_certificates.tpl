{{/* How this installation is closed, as JSON: issuer of its certificates (job, cert-manager, or none) and hasPolicies. What is
`auto` is closed in a new release; an upgrade keeps what the release had, which is in the config map NAME-security, because pods
with certificates and pods without do not understand each other. A release of an older chart has no such config map. The result is
kept in the values, since every lookup asks the API server. */}}
{{- define "outrider.closed" -}}
{{- if not (hasKey .Values.tls "_closed") }}
{{- $earlier := dict }}
{{- if .Release.IsUpgrade }}
{{- $earlier = (lookup "v1" "ConfigMap" .Release.Namespace (printf "%s-security" (include "outrider.fullname" .)) | default dict).data | default dict }}
{{- end }}
{{- $issuer := ternary "none" (get $earlier "issuer" | default "none") (not .Release.IsUpgrade) }}
{{- $asked := toString .Values.tls.enabled }}
{{- $isOn := or (eq $asked "true") (and (eq $asked "auto") (not .Values.attach.tlsSecret) (or (not .Release.IsUpgrade) (ne $issuer "none"))) }}
{{- if not $isOn }}{{ $issuer = "none" }}
{{- else if .Values.tls.issuer }}{{ $issuer = .Values.tls.issuer }}
{{- else if eq $issuer "none" }}{{ $issuer = ternary "job" "cert-manager" (eq $asked "auto") }}
{{- end }}
{{- $policies := toString .Values.networkPolicy.enabled }}
{{- $hasPolicies := or (eq $policies "true") (and (eq $policies "auto") (or (not .Release.IsUpgrade) (eq (get $earlier "networkPolicies") "true"))) }}
{{- $_ := set .Values.tls "_closed" (dict "issuer" $issuer "hasPolicies" $hasPolicies) }}
{{- end }}
{{- toJson .Values.tls._closed }}
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
