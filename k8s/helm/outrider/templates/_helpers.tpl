{{/* Names begin with the release's, which contains the chart's name once. */}}
{{- define "outrider.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 24 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" (.Release.Name | trunc 15 | trimSuffix "-") .Chart.Name }}{{ end }}
{{- end }}

{{- define "outrider.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
app.kubernetes.io/part-of: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels by which pods of one part are selected. Not app.kubernetes.io/name, which KubeRay sets. Takes root, component
and, for a pool, pair. */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pair }}
outrider.dev/pair: {{ . }}
{{- end }}
{{- end }}

{{/* An image of ours. Takes root, repository and suffix. */}}
{{- define "outrider.image" -}}
{{- if not .root.Values.images.registry }}
{{- fail "images.registry is empty: name the registry that has Outrider's images (docs/operations/kubernetes.md, Images). A published chart names its own." }}
{{- end -}}
{{- $images := .root.Values.images }}
{{- $tag := $images.tag | default .root.Chart.AppVersion }}
{{- $digest := ternary (get ($images.digests | default dict) (printf "%s%s" .repository .suffix)) "" (eq $tag .root.Chart.AppVersion) -}}
{{ $images.registry }}/{{ .repository }}:{{ $tag }}{{ .suffix }}{{ with $digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "outrider.coordinator.image" -}}
{{- .Values.coordinator.image | default (include "outrider.image" (dict "root" . "repository" .Values.images.coordinator "suffix" (ternary "" "-demo" (eq (include "outrider.models.isVolume" .) "true")))) }}
{{- end }}

{{- define "outrider.pod.security" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "outrider.container.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What all pods begin with. Takes root, account and callsApi: whether the pod has a token for the cluster's API. */}}
{{- define "outrider.pod.common" -}}
serviceAccountName: {{ include "outrider.fullname" .root }}-{{ .account }}
automountServiceAccountToken: {{ .callsApi | default false }}
{{- with include "outrider.priorityClass" .root }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* A class is cluster-wide, so its name has the namespace. */}}
{{- define "outrider.priorityClass" -}}
{{- if .Values.priorityClass.create }}{{ .Release.Namespace }}-{{ include "outrider.fullname" . }}
{{- else }}{{ .Values.priorityClass.name }}{{ end }}
{{- end }}

{{- define "outrider.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "outrider.selector" . | nindent 6 }}
{{- end }}

{{/* Whether this release has a Redis, and coordinators on Ray. It has neither with draft pools alone. */}}
{{- define "outrider.hasRedis" -}}
{{ and .Values.redis.enabled (not .Values.attach.enabled) }}
{{- end }}

{{/* Whether some pair has memory workers. */}}
{{- define "outrider.hasMemory" -}}
{{- $found := false }}
{{- range .Values.pairs }}{{ if kindIs "map" .memory }}{{ $found = true }}{{ end }}{{ end }}
{{- and $found (not .Values.attach.enabled) }}
{{- end }}

{{- define "outrider.isOnRay" -}}
{{ and (eq .Values.coordinator.hosting "ray") (not .Values.attach.enabled) }}
{{- end }}

{{/* Refuses values of which some mean draft pools alone and some do not. */}}
{{- define "outrider.check" -}}
{{- $attach := .Values.attach }}
{{- if and $attach.tlsSecret (or (eq (toString .Values.tls.enabled) "true") (not $attach.enabled)) }}
{{- fail "attach.tlsSecret is for attach.enabled without tls.enabled" }}
{{- end }}
{{- if gt (int $attach.hintPorts.first) (int $attach.hintPorts.last) }}{{ fail "attach.hintPorts: first is above last" }}{{ end }}
{{- $remembers := or .Values.coordinator.memoryTenants (hasKey .Values.coordinator.settings "memory_tenants") }}
{{- range .Values.pairs }}
{{- if and (kindIs "map" .memory) (not $remembers) }}
{{- fail (printf "pairs: %s has memory workers, and nobody is remembered: name tenants in coordinator.memoryTenants, or [\"*\"] for all" .name) }}
{{- end }}
{{- if $attach.enabled }}
{{- if kindIs "map" .memory }}{{ fail (printf "pairs: %s has memory workers, which follow requests of coordinators; attach.enabled installs drafts alone" .name) }}{{ end }}
{{- if .target }}{{ fail (printf "pairs: %s has a target, and with attach.enabled the engines that are there are the targets; leave `target` out" .name) }}{{ end }}
{{- if not .draft }}{{ fail (printf "pairs: %s has no draft, and attach.enabled installs drafts alone" .name) }}{{ end }}
{{- else }}
{{- if not .target }}{{ fail (printf "pairs: %s has no target; only with attach.enabled others have the targets" .name) }}{{ end }}
{{- if .tokenizer }}{{ fail (printf "pairs: tokenizer of %s is for attach.enabled; else the target has it" .name) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The address that Ray's processes listen on. Workers and plain coordinators listen on `::`, which is both families. */}}
{{- define "outrider.ray.host" -}}
{{- ternary "::" "0.0.0.0" (eq .Values.network.family "ipv6") }}
{{- end }}

{{- define "outrider.redis.secret" -}}
{{- .Values.redis.existingSecret | default (printf "%s-redis" (include "outrider.fullname" .)) }}
{{- end }}

{{- define "outrider.apiKeys.secret" -}}
{{- .Values.apiKeys.existingSecret | default (printf "%s-api-keys" (include "outrider.fullname" .)) }}
{{- end }}

{{/* The service that takes requests; KubeRay makes and names that of a RayService. */}}
{{- define "outrider.coordinator.service" -}}
{{- include "outrider.fullname" . }}-coordinator{{ if eq .Values.coordinator.hosting "ray" }}-serve-svc{{ end }}
{{- end }}

{{/* The settings of a pool of a pair: those of all pools, overridden by the pair's. Takes root, pair and role; YAML. */}}
{{- define "outrider.pool" -}}
{{- $pool := mergeOverwrite (deepCopy (get .root.Values .role)) (deepCopy (get .pair .role | default dict)) }}
{{- if and (eq .role "draft") $pool.earlyExitLayer (not $pool.model) .pair.target }}
{{- $_ := set $pool "model" (.pair.target.model | default .root.Values.target.model) }}
{{- end }}
{{- toYaml $pool }}
{{- end }}

{{- define "outrider.rayRedis.secret" -}}
{{- .Values.coordinator.ray.faultTolerance.existingSecret | default (printf "%s-ray-redis" (include "outrider.fullname" .)) }}
{{- end }}
