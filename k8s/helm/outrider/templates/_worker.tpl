{{/* The pod of a worker of either kind, with metadata. Takes root, pair (the whole), role, pool and isFollower. A target on
several nodes has one pod for each; they have the same command line, and only the leader (rank 0) serves. */}}
{{- define "outrider.worker.pod" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{- $role := .role }}
{{- $isFollower := .isFollower }}
{{- $fullname := include "outrider.fullname" $root }}
{{- $hasTls := eq (include "outrider.hasTls" $root) "true" }}
{{- $isAttached := $root.Values.attach.enabled }}
{{- $nodes := int ($pool.nodes | default 1) }}
{{- $ranks := max 1 (int $pool.gpu.count) }}
{{- $isGroup := gt $nodes 1 }}
{{- $isVllm := and (eq $role "target") (eq ($pool.engine | default "outrider") "vllm") }}
{{- if and $isVllm (or $isGroup (not $pool.image)) }}
{{- fail (printf "target of %s: engine vllm needs an image, and its pods are on one node each" .pair.name) }}
{{- end }}
{{- $hasClaim := and $pool.gpu.deviceClass (gt (int $pool.gpu.count) 0) }}
{{- $model := include "outrider.models.shared" (dict "root" $root "pair" .pair "role" $role "model" $pool.model) }}
{{- $target := include "outrider.pool" (dict "root" $root "pair" .pair "role" "target") | fromYaml }}
{{- $targetModel := .pair.tokenizer }}
{{- $sources := list }}
{{- if not $isAttached }}
{{- $targetModel = include "outrider.models.folder" (dict "root" $root "pair" .pair.name "role" "target" "model" $target.model) }}
{{- if and (eq $role "draft") (contains "://" $target.model) }}{{ $sources = append $sources (dict "source" $target.model "folder" $targetModel) }}{{ end }}
{{- end }}
{{- if and (contains "://" $pool.model) (or $isAttached (eq $role "target") (ne $model $targetModel)) }}{{ $sources = append $sources (dict "source" $pool.model "folder" $model) }}{{ end }}
{{- $head := "" }}
{{- if eq $role "target" }}{{ with $pool.draftHead }}
{{- if or $isVllm (and (eq $pool.device "cuda") (gt (mul $nodes $ranks) 1)) }}
{{- fail (printf "target of %s: draftHead needs Outrider's own engine, and one GPU" $.pair.name) }}
{{- end }}
{{- $head = include "outrider.models.shared" (dict "root" $root "pair" $.pair "role" "head" "model" .) }}
{{- if and (contains "://" .) (ne $head $model) }}{{ $sources = append $sources (dict "source" . "folder" $head) }}{{ end }}
{{- end }}{{ end }}
{{- $component := ternary (printf "%s-follower" $role) $role $isFollower }}
{{- $healthPort := ternary 50052 50051 $hasTls }}
{{- if and (eq $pool.device "cuda") (lt (int $pool.gpu.count) 1) }}
{{- fail (printf "%s of %s: device cuda needs gpu.count" $role .pair.name) }}
{{- end }}
metadata:
  labels:
    {{- include "outrider.labels" $root | nindent 4 }}
    {{- include "outrider.selector" (dict "root" $root "component" $component "pair" .pair.name) | nindent 4 }}
    {{- with $pool.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $pool.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "outrider.pod.common" (dict "root" $root "account" $role) | nindent 2 }}
  terminationGracePeriodSeconds: {{ add (int $pool.drainSeconds) (ternary 30 60 (eq $role "draft")) }}
  topologySpreadConstraints:
    {{- include "outrider.spread" (dict "root" $root "component" $component "pair" .pair.name) | nindent 4 }}
  {{- with $pool.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $pool.affinity }}
  affinity: {{- toYaml $pool.affinity | nindent 4 }}
  {{- else if and (eq $role "draft") (not $isAttached) }}
  affinity:  # hints travel at every step
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: topology.kubernetes.io/zone
            labelSelector:
              matchLabels: {{- include "outrider.selector" (dict "root" $root "component" "target" "pair" .pair.name) | nindent 16 }}
  {{- end }}
  {{- if $hasClaim }}
  resourceClaims:
    - {name: gpus, resourceClaimTemplateName: {{ $fullname }}-{{ .pair.name }}-{{ $role }}-gpus}
  {{- end }}
  securityContext: {{- include "outrider.pod.security" (dict "user" 10001) | nindent 4 }}
  {{- if $sources }}
  initContainers:
    {{- include "outrider.models.waits" (dict "root" $root "sources" $sources) | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ $pool.image | default (include "outrider.image" (dict "root" $root "repository" $root.Values.images.worker "suffix" (printf "-%s" (ternary $pool.device "demo" (eq (include "outrider.models.isVolume" $root) "true"))))) }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      {{- if $isVllm }}
      command: [python3, -m]
      {{- else if $isGroup }}
      # SIGTERM reaches every rank. Rank 0 needs the others to drain, so torchrun waits as long.
      command:
        - torchrun
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --nproc-per-node={{ $ranks }}
        - --master-addr=$(LWS_LEADER_ADDRESS)
        - --master-port=29500
        # Nodes of a group come hours apart where one has to be started first or pulls its image. torchrun waits 10 minutes.
        - --rdzv-conf=timeout=14400
        - --shutdown-timeout={{ add (int $pool.drainSeconds) 30 }}
        - -m
      {{- else if gt $ranks 1 }}
      # SIGTERM reaches every rank. Rank 0 needs the others to drain, so torchrun waits as long.
      command: [torchrun, --standalone, --nproc-per-node={{ $ranks }}, --shutdown-timeout={{ add (int $pool.drainSeconds) 30 }}, -m]
      {{- end }}
      args:
        - {{ $role }}_worker
        - --model={{ $model }}
        {{- if eq $role "target" }}
        - --served-model-name={{ .pair.servedModelName }}
        {{- with $head }}
        - --draft-head={{ . }}
        {{- end }}
        {{- else }}
        - --served-model-name={{ .pair.name }}-draft
        {{- with $targetModel }}
        - --target-tokenizer={{ . }}
        {{- end }}
        {{- with $pool.earlyExitLayer }}
        - --early-exit-layer={{ int . }}
        {{- end }}
        {{- end }}
        {{- if $isVllm }}
        - --engine=vllm
        {{- else }}
        - --device={{ $pool.device }}
        - --max-num-seqs={{ int $pool.maxNumSeqs }}
        {{- with $pool.maxModelLen }}
        - --max-model-len={{ . }}
        {{- end }}
        {{- with $pool.memoryUtilization }}
        - --memory-utilization={{ . }}
        {{- end }}
        {{- end }}
        - "--host=::"  # all addresses, of both families
        - --port=50051
        - --announce=$(POD_IP)  # and the port; bare, because the address may be IPv6
        - --metrics-port=9100
        - --worker-id=$(POD_NAME)
        - --drain-grace-s={{ int $pool.drainSeconds }}
        {{- if not $isAttached }}
        - --redis-url-file=/etc/outrider/redis/url
        {{- end }}
        - --log-format=json
        {{- if $hasTls }}
        - --tls-dir=/etc/outrider/tls
        - --health-port=50052
        {{- else }}
        - --insecure
        {{- end }}
        {{- range $pool.args }}
        - {{ . | quote }}
        {{- end }}
        {{- if $isVllm }}
        - "--"  # vLLM's own from here on
        - --tensor-parallel-size={{ $ranks }}
        - --max-num-seqs={{ int $pool.maxNumSeqs }}
        {{- with $pool.maxModelLen }}
        - --max-model-len={{ . }}
        {{- end }}
        {{- with $pool.memoryUtilization }}
        - --gpu-memory-utilization={{ . }}
        {{- end }}
        {{- range $pool.vllmArgs }}
        - {{ . | quote }}
        {{- end }}
        {{- end }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        # Draft workers in the target's zone are chosen first. Kubernetes copies the label from the node from 1.35 on.
        - name: OUTRIDER_ZONE
          {{- if $root.Values.zone }}
          value: {{ $root.Values.zone | quote }}
          {{- else }}
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
          {{- end }}
        {{- if $isGroup }}
        - {name: GLOO_SOCKET_IFNAME, value: {{ $root.Values.network.interface | quote }}}
        - {name: NCCL_SOCKET_IFNAME, value: {{ $root.Values.network.interface | quote }}}
        {{- end }}
        {{- with $pool.env }}{{ toYaml . | nindent 8 }}{{ end }}
      ports:
        - {name: grpc, containerPort: 50051}
        - {name: metrics, containerPort: 9100}
        {{- if $isGroup }}
        - {name: rendezvous, containerPort: 29500}
        {{- end }}
        {{- if $hasTls }}
        - {name: health, containerPort: 50052}
        {{- end }}
      {{- if not $isFollower }}
      # The worker is alive as soon as it listens, in seconds, and ready when its model is loaded, for which there is no limit.
      # If loading gets stuck, it ends by itself, after --load-stall-exit-s.
      startupProbe:
        grpc: {port: {{ $healthPort }}, service: liveness}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 120
      # This restarts a worker whose model hangs. It also ends by itself, after --stall-exit-s.
      livenessProbe:
        grpc: {port: {{ $healthPort }}, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        grpc: {port: {{ $healthPort }}}
        periodSeconds: 5
        timeoutSeconds: 3
      {{- end }}
      resources:
        {{- $limits := deepCopy ($pool.resources.limits | default dict) }}
        {{- $requests := deepCopy ($pool.resources.requests | default dict) }}
        {{- if and (gt (int $pool.gpu.count) 0) (not $hasClaim) }}
        {{- $_ := set $limits $pool.gpu.resource (toString (int $pool.gpu.count)) }}
        {{- $_ := set $requests $pool.gpu.resource (toString (int $pool.gpu.count)) }}
        {{- end }}
        {{- with $pool.rdma }}{{ if .resource }}
        {{- $_ := set $limits .resource (toString (int .count)) }}
        {{- $_ := set $requests .resource (toString (int .count)) }}
        {{- end }}{{ end }}
        requests: {{- toYaml $requests | nindent 10 }}
        limits: {{- toYaml $limits | nindent 10 }}
        {{- if $hasClaim }}
        claims: [{name: gpus}]
        {{- end }}
      securityContext: {{- include "outrider.container.security" nil | nindent 8 }}
      volumeMounts:
        {{- include "outrider.models.mount" $root | nindent 8 }}
        - {name: scratch, mountPath: /tmp}
        {{- if or $isGroup (gt $ranks 1) }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- if not $isAttached }}
        - {name: redis, mountPath: /etc/outrider/redis, readOnly: true}
        {{- end }}
        {{- if $hasTls }}
        - {name: tls, mountPath: /etc/outrider/tls, readOnly: true}
        {{- end }}
  volumes:
    {{- include "outrider.models.volume" $root | nindent 4 }}
    - name: scratch
      emptyDir: {sizeLimit: 2Gi}
    {{- if or $isGroup (gt $ranks 1) }}
    - name: shared-memory  # ranks of a node need more than the default of 64 MiB; counts as memory
      emptyDir: {medium: Memory, sizeLimit: 2Gi}
    {{- end }}
    {{- if not $isAttached }}
    - name: redis
      secret:
        secretName: {{ include "outrider.redis.secret" $root }}
        defaultMode: 0440
        items:
          - {key: url-{{ $role }}, path: url}
    {{- end }}
    {{- if $hasTls }}
    {{- include "outrider.tls.volume" (dict "root" $root "role" $role) | nindent 4 }}
    {{- end }}
{{- end }}
