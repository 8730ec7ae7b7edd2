{{/* What the schema of the values cannot say: combinations that would not work. */}}
{{- define "bei.checks" -}}
{{- with .Values -}}
{{- if and .artifacts (not .models) -}}
{{- fail "artifacts are mounted on /models: name those to serve in models, such as [/models/minilm]." -}}
{{- end -}}
{{- if and .artifacts.image (not (semverCompare ">=1.33-0" $.Capabilities.KubeVersion.Version)) -}}
{{- fail "artifacts.image needs Kubernetes 1.33 or later: use persistentVolumeClaim or download." -}}
{{- end -}}
{{- if and .tls.clientAuth (not .tls.secretName) -}}
{{- fail "tls.clientAuth needs tls.secretName." -}}
{{- end -}}
{{- if and .signature.secretName (not .signature.keys) -}}
{{- fail "signature.secretName needs signature.keys: the entries of the Secret that are public keys." -}}
{{- end -}}
{{- if and .settings.metrics_need_key (not .apiKeys.secretName) -}}
{{- fail "settings.metrics_need_key needs apiKeys.secretName." -}}
{{- end -}}
{{- if ne .metrics.monitor "none" -}}
{{- if and .settings.metrics_need_key (not .metrics.credentials) -}}
{{- fail "settings.metrics_need_key: give Prometheus a key with metrics.credentials." -}}
{{- end -}}
{{- if and .tls.secretName (not .metrics.tlsConfig) -}}
{{- fail "tls.secretName: say in metrics.tlsConfig how Prometheus verifies the server." -}}
{{- end -}}
{{- end -}}
{{- if ne .autoscaling.kind "none" -}}
{{- if lt (int .autoscaling.maxReplicas) (int .autoscaling.minReplicas) -}}
{{- fail "autoscaling.maxReplicas is less than autoscaling.minReplicas." -}}
{{- end -}}
{{- $limits := dict "interactive" (dig "interactive_max_wait" 5 .settings) "bulk" (dig "bulk_max_wait" 20 .settings) -}}
{{- range $lane, $seconds := .autoscaling.waitSeconds -}}
{{- if and $seconds (ge (float64 $seconds) (float64 (get $limits $lane))) -}}
{{- fail (printf "autoscaling.waitSeconds.%s is not below settings.%s_max_wait: requests are refused before a replica is added." $lane $lane) -}}
{{- end -}}
{{- end -}}
{{- if not (include "bei.scaledLanes" $ | fromJsonArray) -}}
{{- fail "autoscaling.waitSeconds has no lane: give one of them seconds." -}}
{{- end -}}
{{- end -}}
{{- if and (eq .autoscaling.kind "keda") (not .autoscaling.keda.serverAddress) -}}
{{- fail "autoscaling.kind keda needs autoscaling.keda.serverAddress." -}}
{{- end -}}
{{- if and .networkPolicy.enabled .artifacts.download (not .networkPolicy.egress) -}}
{{- fail "artifacts.download connects somewhere: allow it in networkPolicy.egress." -}}
{{- end -}}
{{- if .embed.enabled -}}
{{- if not (and .embed.input .embed.output) -}}
{{- fail "embed needs embed.input and embed.output." -}}
{{- end -}}
{{- if not (or .embed.artifact .models) -}}
{{- fail "embed needs embed.artifact, or models." -}}
{{- end -}}
{{- if and .networkPolicy.enabled (not .networkPolicy.egress) (contains "://" (join " " (append .embed.input .embed.output))) -}}
{{- fail "embed connects to a bucket: allow it in networkPolicy.egress." -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Lanes that the autoscaler looks at, as JSON. */}}
{{- define "bei.scaledLanes" -}}
{{- $lanes := list -}}
{{- range $lane, $seconds := .Values.autoscaling.waitSeconds -}}
{{- if $seconds -}}
{{- $lanes = append $lanes $lane -}}
{{- end -}}
{{- end -}}
{{- toJson $lanes -}}
{{- end -}}
