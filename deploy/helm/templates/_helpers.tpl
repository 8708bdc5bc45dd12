{{- define "outrider.name" -}}
{{- $whole := printf "%s-%s" .Release.Name .Chart.Name }}
{{- ternary .Release.Name $whole (contains .Chart.Name .Release.Name) | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* What chooses the pods of a component: dict "root" $ "component" "server" */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "outrider.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret }}{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.list }}{{ include "outrider.name" . }}-keys{{ end }}
{{- end }}

{{- define "outrider.claim" -}}
{{- .Values.modelCache.existingClaim | default (printf "%s-models" (include "outrider.name" .)) }}
{{- end }}
