{{/* Names are fixed, not derived from the release's: a cluster has one Everstep, and Helm refuses a second release because
     its objects exist already. */}}

{{- define "everstep.labels" -}}
app.kubernetes.io/name: everstep-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ include "everstep.labelValue" .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: everstep
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | include "everstep.labelValue" }}
{{- end }}

{{/* A label may not hold the + of a version such as 0.1.0+g1234567. */}}
{{- define "everstep.labelValue" -}}
{{ . | replace "+" "_" | trunc 63 | trimAll "-_." }}
{{- end }}

{{- define "everstep.monitoringLabels" -}}
{{ include "everstep.labels" . | fromYaml | merge (deepCopy (.Values.monitoringLabels | default dict)) | toYaml }}
{{- end }}

{{- define "everstep.selector" -}}
app.kubernetes.io/name: everstep-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "everstep.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{ .Values.image.repository }}{{ ternary "@" ":" (hasPrefix "sha256:" $tag) }}{{ $tag }}
{{- end }}

{{- define "everstep.keySecret" -}}
{{ .Values.key.existingSecret | default "everstep-operator-key" }}
{{- end }}

{{- define "everstep.lease" -}}
{{ .Release.Namespace }}/everstep-operator
{{- end }}

{{/* User name of one of the chart's ServiceAccounts: (list $ "everstep-nodes") */}}
{{- define "everstep.user" -}}
system:serviceaccount:{{ (index . 0).Release.Namespace }}:{{ index . 1 }}
{{- end }}

{{- define "everstep.operatorSubject" -}}
- kind: ServiceAccount
  name: everstep-operator
  namespace: {{ .Release.Namespace | quote }}
{{- end }}

{{- define "everstep.exporterNamespaces" -}}
{{ join ", " (.Values.exporter.namespaces | default (list "gpu-operator" "nvidia-gpu-operator" "gke-managed-system" "kube-system")) }}
{{- end }}

{{- define "everstep.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "everstep.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
