# The S3 server of the kind lab. The context is the folder of the binary that the lab built.
FROM scratch
COPY minio /minio
ENTRYPOINT ["/minio"]
