{{/* Whether a volume at /models has the models; otherwise the image has them. */}}
{{- define "outrider.models.isVolume" -}}
{{- $models := .Values.models }}
{{- $given := compact (list $models.claim $models.create.size $models.image) }}
{{- if gt (len $given) 1 }}{{ fail "models: give one of claim, create.size and image" }}{{ end -}}
{{ gt (len $given) 0 }}
{{- end }}

{{- define "outrider.models.claim" -}}
{{- .Values.models.claim | default (printf "%s-models" (include "outrider.fullname" .)) }}
{{- end }}

{{/* The volume, as an entry of `volumes`. */}}
{{- define "outrider.models.volume" -}}
{{- if .Values.models.image }}
- name: models
  image: {reference: {{ .Values.models.image | quote }}, pullPolicy: IfNotPresent}
{{- else if eq (include "outrider.models.isVolume" .) "true" }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "outrider.models.claim" . }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "outrider.models.mount" -}}
{{- if eq (include "outrider.models.isVolume" .) "true" }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{/* Whose folder a model is in: the target's or the draft's if it is theirs, so that nothing is fetched twice. Takes root,
pair (the whole), role and model. */}}
{{- define "outrider.models.owner" -}}
{{- $target := include "outrider.pool" (dict "root" .root "pair" .pair "role" "target") | fromYaml }}
{{- $draft := include "outrider.pool" (dict "root" .root "pair" .pair "role" "draft") | fromYaml }}
{{- if and .pair.target (eq .model $target.model) }}target
{{- else if and .pair.draft (eq .model $draft.model) }}draft
{{- else }}{{ .role }}{{ end }}
{{- end }}

{{/* The folder of a model or draft head that may be its owner's. Takes root, pair (the whole), role and model. */}}
{{- define "outrider.models.shared" -}}
{{- include "outrider.models.folder" (dict "root" .root "pair" .pair.name "role" (include "outrider.models.owner" .) "model" .model) }}
{{- end }}

{{/* The folder of a model. A source has one of its own, so that pods of the previous source keep theirs during a rollout.
Takes root, pair, role and model. */}}
{{- define "outrider.models.folder" -}}
{{- if contains "://" .model }}
{{- if or .root.Values.models.image (ne (include "outrider.models.isVolume" .root) "true") }}
{{- fail (printf "pairs: %s of %s is fetched from %s and needs a volume: set models.create.size or models.claim" .role .pair .model) }}
{{- end -}}
/models/{{ .pair }}-{{ .role }}-{{ .model | sha256sum | trunc 8 }}
{{- else }}{{ .model }}{{ end }}
{{- end }}

{{/* The containers that wait until Jobs have fetched the models. Takes root and sources: a list of (source, folder). */}}
{{- define "outrider.models.waits" -}}
{{- range .sources }}
- name: wait-for-{{ base .folder }}
  image: {{ include "outrider.coordinator.image" $.root }}
  imagePullPolicy: {{ $.root.Values.images.pullPolicy }}
  args: [command_line, fetch, {{ .source | quote }}, {{ .folder }}, --wait-only, --max-wait-s={{ int $.root.Values.models.fetch.waitSeconds }}]
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {memory: 512Mi}
  securityContext: {{- include "outrider.container.security" nil | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
    - {name: scratch, mountPath: /tmp}
{{- end }}
{{- end }}

{{/* The pod that fetches a model. Takes root, model (its source) and folder. */}}
{{- define "outrider.fetch.pod" -}}
metadata:
  labels:
    {{- include "outrider.labels" $.root | nindent 4 }}
    {{- include "outrider.selector" (dict "root" $.root "component" "fetch") | nindent 4 }}
spec:
  {{- include "outrider.pod.common" (dict "root" $.root "account" (ternary "draft" "coordinator" $.root.Values.attach.enabled)) | nindent 2 }}
  restartPolicy: OnFailure
  securityContext: {{- include "outrider.pod.security" (dict "user" 10001) | nindent 4 }}
  containers:
    - name: fetch
      image: {{ include "outrider.coordinator.image" $.root }}
      imagePullPolicy: {{ $.root.Values.images.pullPolicy }}
      args: [command_line, fetch, {{ .model | quote }}, {{ .folder }}]
      {{- with $.root.Values.models.fetch.secret }}
      envFrom:
        - secretRef: {name: {{ . }}}
      {{- end }}
      env:
        - {name: HF_HUB_OFFLINE, value: "0"}
        {{- with $.root.Values.models.fetch.env }}{{ toYaml . | nindent 8 }}{{ end }}
      resources: {{- toYaml $.root.Values.models.fetch.resources | nindent 8 }}
      securityContext: {{- include "outrider.container.security" nil | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: scratch, mountPath: /tmp}
  volumes:
    - name: models
      persistentVolumeClaim: {claimName: {{ include "outrider.models.claim" $.root }}}
    - name: scratch
      emptyDir: {sizeLimit: 2Gi}
{{- end }}
