{{/* Settings of every replica, as YAML: the `args` of Serve's application, or the file of a plain process. */}}
{{- define "outrider.coordinator.settings" -}}
models_file: /etc/outrider/models/models.toml
deadline_max_s: {{ int .Values.coordinator.deadlineMaxSeconds }}
requests_max: {{ int .Values.coordinator.maxRequests }}
log_format: json
logs_requests: true
metrics_port: 9100
metrics_host: "::"
{{- if .Values.coordinator.batches.files }}
batch_files: {{ ternary "/batches" .Values.coordinator.batches.files (not (empty .Values.coordinator.batches.claim)) }}
{{- end }}
{{- with .Values.coordinator.oidc }}{{ if .issuer }}
oidc_issuer: {{ .issuer | quote }}
oidc_audience: {{ .audience | quote }}
{{- end }}{{ end }}
{{- with .Values.coordinator.memoryTenants }}
memory_tenants: {{ toJson . }}
{{- end }}
{{- with .Values.coordinator.settings }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Variables of every replica. */}}
{{- define "outrider.coordinator.env" -}}
{{- if eq (include "outrider.hasTls" .) "true" }}
- {name: OUTRIDER_TLS_DIR, value: /etc/outrider/tls}
{{- else }}
# Without certificates everybody who reaches the metrics port can read it.
- {name: OUTRIDER_METRICS_INSECURE, value: "1"}
{{- end }}
- {name: OUTRIDER_REDIS_URL_FILE, value: /etc/outrider/redis/url}
- {name: OUTRIDER_API_KEYS, value: /etc/outrider/keys/keys.toml}
{{- with .Values.coordinator.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "outrider.coordinator.mounts" -}}
{{- include "outrider.models.mount" . }}
- {name: scratch, mountPath: /tmp}
- {name: models-file, mountPath: /etc/outrider/models, readOnly: true}
- {name: redis, mountPath: /etc/outrider/redis, readOnly: true}
- {name: keys, mountPath: /etc/outrider/keys, readOnly: true}
{{- if eq (include "outrider.hasTls" .) "true" }}
- {name: tls, mountPath: /etc/outrider/tls, readOnly: true}
{{- end }}
{{- if .Values.coordinator.batches.claim }}
- {name: batches, mountPath: /batches}
{{- end }}
{{- end }}

{{- define "outrider.coordinator.volumes" -}}
{{- include "outrider.models.volume" . }}
- name: scratch
  emptyDir: {sizeLimit: 8Gi}
- name: models-file
  configMap: {name: {{ include "outrider.fullname" . }}-models}
- name: redis
  secret:
    secretName: {{ include "outrider.redis.secret" . }}
    defaultMode: 0440
    items:
      - {key: url-coordinator, path: url}
- name: keys
  secret:
    secretName: {{ include "outrider.apiKeys.secret" . }}
    defaultMode: 0440
    items:
      - {key: keys.toml, path: keys.toml}
{{- if eq (include "outrider.hasTls" .) "true" }}
{{ include "outrider.tls.volume" (dict "root" . "role" "coordinator") }}
{{- end }}
{{- with .Values.coordinator.batches.claim }}
- name: batches
  persistentVolumeClaim: {claimName: {{ . }}}
{{- end }}
{{- end }}

{{/* Where its pods run, and with what. Takes root and component. */}}
{{- define "outrider.coordinator.placement" -}}
{{- with .root.Values.coordinator.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.coordinator.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.coordinator.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- include "outrider.spread" . | nindent 2 }}
securityContext: {{- include "outrider.pod.security" (dict "user" 10001) | nindent 2 }}
{{- $sources := list }}
{{- range $pair := .root.Values.pairs }}
{{- $pool := include "outrider.pool" (dict "root" $.root "pair" $pair "role" "target") | fromYaml }}
{{- if contains "://" $pool.model }}
{{- $folder := include "outrider.models.folder" (dict "root" $.root "pair" $pair.name "role" "target" "model" $pool.model) }}
{{- $sources = append $sources (dict "source" $pool.model "folder" $folder) }}
{{- end }}
{{- end }}
{{- if $sources }}
initContainers:
  {{- include "outrider.models.waits" (dict "root" .root "sources" $sources) | nindent 2 }}
{{- end }}
{{- end }}
