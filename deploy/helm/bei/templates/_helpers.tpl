{{- define "bei.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "bei.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "bei.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "bei.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "bei.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "bei.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Of the pods that answer HTTP. They are in selectors, which cannot change: nothing else belongs here. */}}
{{- define "bei.serverLabels" -}}
app.kubernetes.io/name: {{ include "bei.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "bei.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "bei.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "bei.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The name of the port of the server. */}}
{{- define "bei.scheme" -}}
{{- ternary "https" "http" (not (empty .Values.tls.secretName)) -}}
{{- end -}}

{{/* Seconds, rounded up, of the longest predicted wait with which a request is accepted. */}}
{{- define "bei.longestWait" -}}
{{- $settings := .Values.settings -}}
{{- maxf (dig "interactive_max_wait" 5 $settings) (dig "bulk_max_wait" 20 $settings) | ceil | int -}}
{{- end -}}

{{- define "bei.gracePeriod" -}}
{{- $hang := dig "hang_timeout" 30 .Values.settings | ceil | int -}}
{{- add .Values.preStopSeconds (include "bei.longestWait" .) $hang .Values.longestRequestSeconds -}}
{{- end -}}

{{/* A setting as a variable has it. toJson writes 4000000, where toString would write 4e+06. */}}
{{- define "bei.settingText" -}}
{{- if kindIs "string" . -}}
{{ . }}
{{- else if kindIs "slice" . -}}
{{ join "," . }}
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}

{{/* What every container needs: where it may write, and what its user names. */}}
{{- define "bei.commonEnv" -}}
- name: BEI_CACHE_DIR
  value: /cache/bei
- name: BEI_CACHE_MAX_SIZE
  value: {{ printf "%dGB" (div (mul .Values.cache.gigabytes 4) 5) | quote }}
- name: XDG_CACHE_HOME
  value: /cache
{{- with .Values.huggingFace }}
{{- if .secretName }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- if .Values.signature.secretName }}
- name: BEI_REQUIRE_SIGNATURE
  value: {{ include "bei.keyFiles" . | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "bei.keyFiles" -}}
{{- $files := list -}}
{{- range .Values.signature.keys -}}
{{- $files = append $files (printf "/etc/bei/signature/%s" .) -}}
{{- end -}}
{{- join "," $files -}}
{{- end -}}

{{- define "bei.serverEnv" -}}
- name: BEI_HOST
  value: "0.0.0.0"
- name: BEI_PORT
  value: "8000"
{{- with .Values.models }}
- name: BEI_MODELS
  value: {{ join "," . | quote }}
{{- end }}
{{- if and (gt (int .Values.gpu.count) 1) (not (hasKey .Values.settings "devices")) }}
- name: BEI_DEVICES
  value: {{ join "," (until (int .Values.gpu.count)) | quote }}
{{- end }}
{{- if .Values.apiKeys.secretName }}
- name: BEI_API_KEYS_FILE
  value: {{ printf "/etc/bei/api-keys/%s" .Values.apiKeys.key | quote }}
{{- end }}
{{- if .Values.tls.secretName }}
- name: BEI_TLS_CERT
  value: /etc/bei/tls/tls.crt
- name: BEI_TLS_KEY
  value: /etc/bei/tls/tls.key
{{- if .Values.tls.clientAuth }}
- name: BEI_TLS_CLIENT_CA
  value: /etc/bei/tls/ca.crt
- name: BEI_UDS
  value: /tmp/bei.sock
- name: BEI_TCP
  value: "true"
{{- end }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- name: BEI_{{ upper $name }}
  value: {{ include "bei.settingText" $value | quote }}
{{- end }}
{{- end -}}

{{/* Of the settings those that `bei embed` has. */}}
{{- define "bei.embedEnv" -}}
{{- $has := list "engine_threads" "engine_streams" "graph_megabytes" "gpu_megabytes" "tokenizer_threads" "auto_truncate" "precision" "untrained_dimensions" "hang_timeout" -}}
{{- range $name, $value := .Values.settings }}
{{- if has $name $has }}
- name: BEI_{{ upper $name }}
  value: {{ include "bei.settingText" $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The volumes of every pod. */}}
{{- define "bei.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
{{- if .Values.cache.storageClassName }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ .Values.cache.storageClassName | quote }}
        resources:
          requests:
            storage: {{ .Values.cache.gigabytes }}G
{{- else }}
  emptyDir:
    sizeLimit: {{ .Values.cache.gigabytes }}G
{{- end }}
{{- with .Values.artifacts.persistentVolumeClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .claimName | quote }}
    readOnly: true
{{- end }}
{{- with .Values.artifacts.image }}
- name: models
  image:
    reference: {{ .reference | quote }}
    pullPolicy: {{ default "IfNotPresent" .pullPolicy }}
{{- end }}
{{- with .Values.artifacts.download }}
- name: models
  emptyDir:
    sizeLimit: {{ .size }}
{{- end }}
{{- with .Values.signature.secretName }}
- name: signature
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "bei.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
{{- if .Values.artifacts }}
- name: models
  mountPath: /models
  readOnly: true
{{- with .Values.artifacts.persistentVolumeClaim }}
{{- with .subPath }}
  subPath: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.signature.secretName }}
- name: signature
  mountPath: /etc/bei/signature
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "bei.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Of a container with so many .gpus. */}}
{{- define "bei.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if .gpus -}}
{{- $limits := merge (dict .Values.gpu.resourceName .gpus) (default dict $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/* What the pods of the server and of the Job have in common. */}}
{{- define "bei.podSpec" -}}
serviceAccountName: {{ include "bei.serviceAccountName" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .Values.gpu.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .Values.tolerations .Values.gpu.count }}
tolerations:
{{- if .Values.gpu.count }}
  - key: {{ .Values.gpu.resourceName | quote }}
    operator: Exists
    effect: NoSchedule
{{- end }}
{{- with .Values.tolerations }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .Values.artifacts.download }}
initContainers:
  - name: download
    image: {{ .image | quote }}
    command:
      {{- toYaml .command | nindent 6 }}
    {{- with .env }}
    env:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      {{- include "bei.containerSecurity" $ | nindent 6 }}
    volumeMounts:
      - name: models
        mountPath: /models
      - name: tmp
        mountPath: /tmp
{{- end }}
{{- end -}}

{{/* A probe of .path, as it is kept from the dialect that the server speaks to whoever does not say. */}}
{{- define "bei.probe" -}}
{{- if .root.Values.tls.clientAuth -}}
exec:
  command:
    - python
    - -c
    - |
      import http.client, socket
      connection = http.client.HTTPConnection("bei")
      connection.sock = socket.socket(socket.AF_UNIX)
      connection.sock.connect("/tmp/bei.sock")
      connection.request("GET", "{{ .path }}", headers={"X-Bei-Dialect": "bei"})
      raise SystemExit(connection.getresponse().status != 200)
{{- else -}}
httpGet:
  path: {{ .path }}
  port: {{ include "bei.scheme" .root }}
  scheme: {{ include "bei.scheme" .root | upper }}
  httpHeaders:
    - name: X-Bei-Dialect
      value: bei
{{- end -}}
{{- end -}}
