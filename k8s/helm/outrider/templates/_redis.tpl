{{/* The container and pod of a Redis. Takes root, component, args, users (a secret), resources, and isEncrypted. */}}
{{- define "outrider.redis.pod" -}}
{{- /* With certificates Redis logs each connection that ends before its handshake, as a probe of the port does. */}}
{{- $probe := "tcpSocket: {port: redis}" }}
{{- if .isEncrypted }}
{{- $probe = "exec: {command: [redis-cli, --tls, --cert, /etc/outrider/tls/tls.crt, --key, /etc/outrider/tls/tls.key, --cacert, /etc/outrider/tls/ca.crt, ping]}" }}
{{- end }}
metadata:
  labels:
    {{- include "outrider.labels" .root | nindent 4 }}
    {{- include "outrider.selector" (dict "root" .root "component" .component) | nindent 4 }}
spec:
  {{- include "outrider.pod.common" (dict "root" .root "account" .component) | nindent 2 }}
  securityContext: {{- include "outrider.pod.security" (dict "user" 999) | nindent 4 }}
  containers:
    - name: redis
      image: {{ .root.Values.images.redis }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      args:
        - /etc/redis/users.conf
        {{- range .args }}
        - {{ . | quote }}
        {{- end }}
        {{- if .isEncrypted }}
        {{- range list "--port" "0" "--tls-port" "6379" "--tls-cert-file" "/etc/outrider/tls/tls.crt" "--tls-key-file" "/etc/outrider/tls/tls.key" "--tls-ca-cert-file" "/etc/outrider/tls/ca.crt" }}
        - {{ . | quote }}
        {{- end }}
        {{- end }}
      ports:
        - {name: redis, containerPort: 6379}
      startupProbe:
        {{ $probe }}
        periodSeconds: 1
        timeoutSeconds: 3
        failureThreshold: 60
      # A minute: a node that is busy delays the probe's own process, and a restart loses what is in memory.
      livenessProbe:
        {{ $probe }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      readinessProbe:
        {{ $probe }}
        periodSeconds: 2
        timeoutSeconds: 3
      resources: {{- toYaml .resources | nindent 8 }}
      securityContext: {{- include "outrider.container.security" nil | nindent 8 }}
      volumeMounts:
        - {name: users, mountPath: /etc/redis, readOnly: true}
        - {name: data, mountPath: /data}
        {{- if .isEncrypted }}
        - {name: tls, mountPath: /etc/outrider/tls, readOnly: true}
        {{- end }}
  volumes:
    - name: users
      secret:
        secretName: {{ .users }}
        defaultMode: 0440
        items:
          - {key: users.conf, path: users.conf}
    {{- if .isEncrypted }}
    {{- include "outrider.tls.volume" (dict "root" .root "role" "redis") | nindent 4 }}
    {{- end }}
    {{- if eq .component "redis" }}
    - name: data
      emptyDir: {sizeLimit: 64Mi}
    {{- end }}
{{- end }}
