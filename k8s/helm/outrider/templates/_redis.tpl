{{/* The container and pod of a Redis. Takes root, component, args, users (a secret), resources, and isEncrypted. */}}
{{- define "outrider.redis.pod" -}}
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
        tcpSocket: {port: redis}
        periodSeconds: 1
        failureThreshold: 60
      livenessProbe:
        tcpSocket: {port: redis}
        periodSeconds: 5
        timeoutSeconds: 3
      readinessProbe:
        tcpSocket: {port: redis}
        periodSeconds: 2
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
    - name: tls
      secret: {secretName: {{ include "outrider.fullname" .root }}-redis-tls, defaultMode: 0440}
    {{- end }}
    {{- if eq .component "redis" }}
    - name: data
      emptyDir: {sizeLimit: 64Mi}
    {{- end }}
{{- end }}
