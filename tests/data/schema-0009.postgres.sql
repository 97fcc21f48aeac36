CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.audit (
    entry_id bigint NOT NULL,
    tenant_id character varying(64) NOT NULL,
    event character varying(64) NOT NULL,
    details json NOT NULL,
    created_at double precision NOT NULL
);
CREATE SEQUENCE public.audit_entry_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.audit_entry_id_seq OWNED BY public.audit.entry_id;
CREATE TABLE public.batch_job (
    job_id bigint NOT NULL,
    tenant_id character varying(64) NOT NULL,
    name text NOT NULL,
    pool character varying(128) NOT NULL,
    priority integer NOT NULL,
    weight double precision NOT NULL,
    status character varying(16) NOT NULL,
    spec json NOT NULL,
    owner_token character varying(64),
    owner_holder text,
    owner_lease_at double precision DEFAULT '0'::double precision NOT NULL,
    sealed boolean NOT NULL,
    total_rows bigint DEFAULT '0'::bigint NOT NULL,
    total_batches bigint DEFAULT '0'::bigint NOT NULL,
    completed_batches bigint DEFAULT '0'::bigint NOT NULL,
    rows_ok bigint DEFAULT '0'::bigint NOT NULL,
    rows_failed bigint DEFAULT '0'::bigint NOT NULL,
    tokens_in bigint DEFAULT '0'::bigint NOT NULL,
    tokens_out bigint DEFAULT '0'::bigint NOT NULL,
    max_failed_rows double precision NOT NULL,
    resume_from bigint,
    root_job_id bigint,
    error text,
    cleaned boolean NOT NULL,
    created_at double precision NOT NULL,
    started_at double precision,
    ended_at double precision,
    updated_at double precision NOT NULL
);
CREATE SEQUENCE public.batch_job_job_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.batch_job_job_id_seq OWNED BY public.batch_job.job_id;
CREATE TABLE public.batch_output (
    job_id bigint NOT NULL,
    output_idx integer NOT NULL,
    format character varying(64) NOT NULL,
    path text NOT NULL,
    rows bigint NOT NULL,
    bytes bigint NOT NULL,
    sha256 character varying(64) NOT NULL,
    etag text,
    published_at double precision NOT NULL
);
CREATE TABLE public.batch_row_error (
    job_id bigint NOT NULL,
    row_idx bigint NOT NULL,
    attempt_id integer NOT NULL,
    error_class character varying(128) NOT NULL,
    message text NOT NULL,
    details json NOT NULL
);
CREATE TABLE public.batch_state (
    job_id bigint NOT NULL,
    batch_idx bigint NOT NULL,
    start_idx bigint NOT NULL,
    end_idx bigint NOT NULL,
    status character varying(16) NOT NULL,
    worker_cluster character varying(128),
    retry_count integer DEFAULT 0 NOT NULL,
    updated_at double precision NOT NULL,
    parent_idx bigint,
    attempt_id integer DEFAULT 0 NOT NULL,
    attempt_owner_token character varying(64),
    lease_expires_at double precision,
    next_retry_at double precision,
    infra_retries integer DEFAULT 0 NOT NULL,
    parts json,
    rows_ok bigint DEFAULT '0'::bigint NOT NULL,
    rows_failed bigint DEFAULT '0'::bigint NOT NULL,
    tokens_in bigint DEFAULT '0'::bigint NOT NULL,
    tokens_out bigint DEFAULT '0'::bigint NOT NULL,
    error_class character varying(128),
    error text
);
CREATE TABLE public.batch_worker (
    pool character varying(128) NOT NULL,
    worker_id character varying(128) NOT NULL,
    job_id bigint NOT NULL,
    owner_token character varying(64) NOT NULL,
    kind character varying(16) NOT NULL,
    address text,
    pid_or_actor character varying(128),
    state character varying(16) NOT NULL,
    started_at double precision NOT NULL,
    last_seen_at double precision NOT NULL,
    launch_intent character varying(64) NOT NULL
);
CREATE TABLE public.checkpoints (
    training_run_id character varying(128) NOT NULL,
    kind character varying(24) NOT NULL,
    name character varying(128) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    state character varying(16) NOT NULL,
    error text,
    directory character varying(256),
    size_bytes bigint,
    base_model character varying(512) NOT NULL,
    lora_rank integer NOT NULL,
    train_attn boolean NOT NULL,
    train_mlp boolean NOT NULL,
    train_unembed boolean NOT NULL,
    optimizer_type character varying(16) NOT NULL,
    public boolean NOT NULL,
    user_metadata json,
    created_at double precision NOT NULL,
    expires_at double precision
);
CREATE TABLE public.curve_points (
    model_id character varying(128) NOT NULL,
    source character varying(8) NOT NULL,
    step bigint NOT NULL,
    metrics json NOT NULL,
    recorded_at double precision NOT NULL
);
CREATE TABLE public.custom_losses (
    loss_id character varying(128) NOT NULL,
    session_id character varying(64) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    name character varying(128) NOT NULL,
    definition bytea NOT NULL,
    created_at double precision NOT NULL
);
CREATE TABLE public.engines (
    base_model character varying(512) NOT NULL,
    engine_id character varying(64) NOT NULL,
    pid integer NOT NULL,
    state character varying(16) NOT NULL,
    reason text,
    started_at double precision NOT NULL,
    holder text DEFAULT ''::text NOT NULL,
    epoch bigint DEFAULT '0'::bigint NOT NULL,
    lease_expires_at double precision DEFAULT '0'::double precision NOT NULL
);
CREATE TABLE public.files (
    "position" bigint NOT NULL,
    file_id character varying(64) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    filename text NOT NULL,
    purpose character varying(32) NOT NULL,
    size_bytes bigint NOT NULL,
    sha256 character varying(64) NOT NULL,
    created_at double precision NOT NULL,
    expires_at double precision
);
CREATE SEQUENCE public.files_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.files_position_seq OWNED BY public.files."position";
CREATE TABLE public.future_bodies (
    request_id character varying(192) NOT NULL,
    body bytea NOT NULL
);
CREATE TABLE public.future_results (
    request_id character varying(192) NOT NULL,
    body bytea NOT NULL
);
CREATE TABLE public.futures (
    arrival bigint NOT NULL,
    request_id character varying(192) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    session_id character varying(64) NOT NULL,
    base_model character varying(512) NOT NULL,
    kind character varying(32) NOT NULL,
    state character varying(16) NOT NULL,
    model_id character varying(128),
    sampling_session_id character varying(128),
    seq_id bigint,
    num_tokens integer NOT NULL,
    error text,
    category character varying(16),
    result_type character varying(8),
    created_at double precision NOT NULL,
    settled_at double precision,
    body_bytes bigint DEFAULT '0'::bigint NOT NULL,
    prefill_tokens integer,
    cached_tokens integer,
    sampled_tokens integer,
    settle_order bigint,
    started_at double precision,
    ran_at double precision,
    step integer,
    traceparent character varying(64)
);
CREATE SEQUENCE public.futures_arrival_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.futures_arrival_seq OWNED BY public.futures.arrival;
CREATE TABLE public.kept_samples (
    "position" bigint NOT NULL,
    request_id character varying(192) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    session_id character varying(64) NOT NULL,
    base_model character varying(512) NOT NULL,
    weights character varying(512),
    prompt_tokens integer NOT NULL,
    sampled_tokens integer NOT NULL,
    num_sequences integer NOT NULL,
    content bytea NOT NULL,
    created_at double precision NOT NULL
);
CREATE SEQUENCE public.kept_samples_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.kept_samples_position_seq OWNED BY public.kept_samples."position";
CREATE TABLE public.keys (
    key_id integer NOT NULL,
    tenant_id character varying(64) NOT NULL,
    name character varying(128) NOT NULL,
    digest character varying(64) NOT NULL,
    created_at double precision NOT NULL,
    revoked_at double precision
);
CREATE SEQUENCE public.keys_key_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.keys_key_id_seq OWNED BY public.keys.key_id;
CREATE TABLE public.models (
    model_id character varying(128) NOT NULL,
    session_id character varying(64) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    base_model character varying(512) NOT NULL,
    state character varying(16) NOT NULL,
    reason text,
    lora_rank integer NOT NULL,
    lora_seed bigint,
    train_attn boolean NOT NULL,
    train_mlp boolean NOT NULL,
    train_unembed boolean NOT NULL,
    optimizer_type character varying(16) NOT NULL,
    user_metadata json,
    applied_seq_id bigint NOT NULL,
    snapshot_seq_id bigint,
    snapshot_directory character varying(64),
    created_at double precision NOT NULL,
    last_request_at double precision NOT NULL,
    project_id character varying(128),
    previous_snapshot_seq_id bigint,
    previous_snapshot_directory character varying(64)
);
CREATE TABLE public.openai_batches (
    "position" bigint NOT NULL,
    batch_id character varying(64) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    status character varying(16) NOT NULL,
    endpoint character varying(64) NOT NULL,
    input_file_id character varying(64) NOT NULL,
    completion_window character varying(16) NOT NULL,
    labels json,
    output_expires_s integer,
    job_id bigint,
    model text,
    errors json,
    total integer DEFAULT 0 NOT NULL,
    completed integer DEFAULT 0 NOT NULL,
    failed integer DEFAULT 0 NOT NULL,
    usage json,
    output_file_id character varying(64),
    error_file_id character varying(64),
    created_at double precision NOT NULL,
    expires_at double precision NOT NULL,
    in_progress_at double precision,
    finalizing_at double precision,
    cancelling_at double precision,
    ended_at double precision
);
CREATE SEQUENCE public.openai_batches_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.openai_batches_position_seq OWNED BY public.openai_batches."position";
CREATE TABLE public.recent_steps (
    "position" bigint NOT NULL,
    base_model character varying(512) NOT NULL,
    ended_at double precision NOT NULL,
    duration_s double precision NOT NULL,
    num_passes integer NOT NULL,
    num_optim_steps integer NOT NULL,
    num_singles integer NOT NULL,
    num_tokens bigint NOT NULL,
    shares json NOT NULL
);
CREATE SEQUENCE public.recent_steps_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.recent_steps_position_seq OWNED BY public.recent_steps."position";
CREATE TABLE public.samplers (
    sampling_session_id character varying(128) NOT NULL,
    session_id character varying(64) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    base_model character varying(512) NOT NULL,
    model_path character varying(512),
    version_id character varying(512),
    directory character varying(64),
    created_at double precision NOT NULL,
    num_clones integer DEFAULT 0 NOT NULL,
    model_id character varying(128)
);
CREATE TABLE public.sequences (
    sequence_id character varying(224) NOT NULL,
    session_id character varying(64) NOT NULL,
    prompt_tokens integer NOT NULL,
    sampled_tokens integer NOT NULL,
    valid_until double precision NOT NULL
);
CREATE TABLE public.sessions (
    session_id character varying(64) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    state character varying(16) NOT NULL,
    reason text,
    tags json NOT NULL,
    user_metadata json,
    sdk_version character varying(64),
    project_id character varying(128),
    display_name text,
    created_at double precision NOT NULL,
    last_heartbeat_at double precision NOT NULL,
    ended_at double precision,
    closed_at double precision,
    finish_type character varying(16),
    forgotten_at double precision
);
CREATE TABLE public.tenants (
    tenant_id character varying(64) NOT NULL,
    quotas json NOT NULL,
    created_at double precision NOT NULL
);
CREATE TABLE public.usage (
    bucket_start double precision NOT NULL,
    session_id character varying(64) NOT NULL,
    base_model character varying(512) NOT NULL,
    type character varying(24) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    quantity bigint NOT NULL
);
ALTER TABLE ONLY public.audit ALTER COLUMN entry_id SET DEFAULT nextval('public.audit_entry_id_seq'::regclass);
ALTER TABLE ONLY public.batch_job ALTER COLUMN job_id SET DEFAULT nextval('public.batch_job_job_id_seq'::regclass);
ALTER TABLE ONLY public.files ALTER COLUMN "position" SET DEFAULT nextval('public.files_position_seq'::regclass);
ALTER TABLE ONLY public.futures ALTER COLUMN arrival SET DEFAULT nextval('public.futures_arrival_seq'::regclass);
ALTER TABLE ONLY public.kept_samples ALTER COLUMN "position" SET DEFAULT nextval('public.kept_samples_position_seq'::regclass);
ALTER TABLE ONLY public.keys ALTER COLUMN key_id SET DEFAULT nextval('public.keys_key_id_seq'::regclass);
ALTER TABLE ONLY public.openai_batches ALTER COLUMN "position" SET DEFAULT nextval('public.openai_batches_position_seq'::regclass);
ALTER TABLE ONLY public.recent_steps ALTER COLUMN "position" SET DEFAULT nextval('public.recent_steps_position_seq'::regclass);
INSERT INTO public.alembic_version VALUES ('0009');
INSERT INTO public.audit VALUES (1, 'a tenant_id', 'a event', '{"a": 1}', 9.5);
INSERT INTO public.batch_job VALUES (1, 'a tenant_id', 'a name', 'a pool', 7, 9.5, 'a status', '{"a": 1}', 'a owner_token', 'a owner_holder', 9.5, true, 8, 8, 8, 8, 8, 8, 8, 9.5, 8, 8, 'a error', true, 9.5, 9.5, 9.5, 9.5);
INSERT INTO public.batch_output VALUES (8, 7, 'a format', 'a path', 8, 8, 'a sha256', 'a etag', 9.5);
INSERT INTO public.batch_row_error VALUES (8, 8, 7, 'a error_class', 'a message', '{"a": 1}');
INSERT INTO public.batch_state VALUES (8, 8, 8, 8, 'a status', 'a worker_cluster', 7, 9.5, 8, 7, 'a attempt_owner_token', 9.5, 9.5, 7, '{"a": 1}', 8, 8, 8, 8, 'a error_class', 'a error');
INSERT INTO public.batch_worker VALUES ('a pool', 'a worker_id', 8, 'a owner_token', 'a kind', 'a address', 'a pid_or_actor', 'a state', 9.5, 9.5, 'a launch_intent');
INSERT INTO public.checkpoints VALUES ('a training_run_id', 'a kind', 'a name', 'a tenant_id', 'a state', 'a error', 'a directory', 8, 'a base_model', 7, true, true, true, 'a optimizer_type', true, '{"a": 1}', 9.5, 9.5);
INSERT INTO public.curve_points VALUES ('a model_id', 'a source', 8, '{"a": 1}', 9.5);
INSERT INTO public.custom_losses VALUES ('a loss_id', 'a session_id', 'a tenant_id', 'a name', '\x006279746573ff', 9.5);
INSERT INTO public.engines VALUES ('a base_model', 'a engine_id', 7, 'a state', 'a reason', 9.5, 'a holder', 8, 9.5);
INSERT INTO public.files VALUES (1, 'a file_id', 'a tenant_id', 'a filename', 'a purpose', 8, 'a sha256', 9.5, 9.5);
INSERT INTO public.future_bodies VALUES ('a request_id', '\x006279746573ff');
INSERT INTO public.future_results VALUES ('a request_id', '\x006279746573ff');
INSERT INTO public.futures VALUES (1, 'a request_id', 'a tenant_id', 'a session_id', 'a base_model', 'a kind', 'a state', 'a model_id', 'a sampling_session_id', 8, 7, 'a error', 'a category', 'a result', 9.5, 9.5, 8, 7, 7, 7, 8, 9.5, 9.5, 7, 'a traceparent');
INSERT INTO public.kept_samples VALUES (1, 'a request_id', 'a tenant_id', 'a session_id', 'a base_model', 'a weights', 7, 7, 7, '\x006279746573ff', 9.5);
INSERT INTO public.keys VALUES (1, 'a tenant_id', 'a name', 'a digest', 9.5, 9.5);
INSERT INTO public.models VALUES ('a model_id', 'a session_id', 'a tenant_id', 'a base_model', 'a state', 'a reason', 7, 8, true, true, true, 'a optimizer_type', '{"a": 1}', 8, 8, 'a snapshot_directory', 9.5, 9.5, 'a project_id', 8, 'a previous_snapshot_directory');
INSERT INTO public.openai_batches VALUES (1, 'a batch_id', 'a tenant_id', 'a status', 'a endpoint', 'a input_file_id', 'a completion_win', '{"a": 1}', 7, 8, 'a model', '{"a": 1}', 7, 7, 7, '{"a": 1}', 'a output_file_id', 'a error_file_id', 9.5, 9.5, 9.5, 9.5, 9.5, 9.5);
INSERT INTO public.recent_steps VALUES (1, 'a base_model', 9.5, 9.5, 7, 7, 7, 8, '{"a": 1}');
INSERT INTO public.samplers VALUES ('a sampling_session_id', 'a session_id', 'a tenant_id', 'a base_model', 'a model_path', 'a version_id', 'a directory', 9.5, 7, 'a model_id');
INSERT INTO public.sequences VALUES ('a sequence_id', 'a session_id', 7, 7, 9.5);
INSERT INTO public.sessions VALUES ('a session_id', 'a tenant_id', 'a state', 'a reason', '{"a": 1}', '{"a": 1}', 'a sdk_version', 'a project_id', 'a display_name', 9.5, 9.5, 9.5, 9.5, 'a finish_type', 9.5);
INSERT INTO public.tenants VALUES ('a tenant_id', '{"a": 1}', 9.5);
INSERT INTO public.usage VALUES (9.5, 'a session_id', 'a base_model', 'a type', 'a tenant_id', 8);
SELECT pg_catalog.setval('public.audit_entry_id_seq', 1, true);
SELECT pg_catalog.setval('public.batch_job_job_id_seq', 1, true);
SELECT pg_catalog.setval('public.files_position_seq', 1, true);
SELECT pg_catalog.setval('public.futures_arrival_seq', 1, true);
SELECT pg_catalog.setval('public.kept_samples_position_seq', 1, true);
SELECT pg_catalog.setval('public.keys_key_id_seq', 1, true);
SELECT pg_catalog.setval('public.openai_batches_position_seq', 1, true);
SELECT pg_catalog.setval('public.recent_steps_position_seq', 1, true);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.audit
    ADD CONSTRAINT pk_audit PRIMARY KEY (entry_id);
ALTER TABLE ONLY public.batch_job
    ADD CONSTRAINT pk_batch_job PRIMARY KEY (job_id);
ALTER TABLE ONLY public.batch_output
    ADD CONSTRAINT pk_batch_output PRIMARY KEY (job_id, output_idx);
ALTER TABLE ONLY public.batch_row_error
    ADD CONSTRAINT pk_batch_row_error PRIMARY KEY (job_id, row_idx);
ALTER TABLE ONLY public.batch_state
    ADD CONSTRAINT pk_batch_state PRIMARY KEY (job_id, batch_idx);
ALTER TABLE ONLY public.batch_worker
    ADD CONSTRAINT pk_batch_worker PRIMARY KEY (pool, worker_id);
ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT pk_checkpoints PRIMARY KEY (training_run_id, kind, name);
ALTER TABLE ONLY public.curve_points
    ADD CONSTRAINT pk_curve_points PRIMARY KEY (model_id, source, step);
ALTER TABLE ONLY public.custom_losses
    ADD CONSTRAINT pk_custom_losses PRIMARY KEY (loss_id);
ALTER TABLE ONLY public.engines
    ADD CONSTRAINT pk_engines PRIMARY KEY (base_model);
ALTER TABLE ONLY public.files
    ADD CONSTRAINT pk_files PRIMARY KEY ("position");
ALTER TABLE ONLY public.future_bodies
    ADD CONSTRAINT pk_future_bodies PRIMARY KEY (request_id);
ALTER TABLE ONLY public.future_results
    ADD CONSTRAINT pk_future_results PRIMARY KEY (request_id);
ALTER TABLE ONLY public.futures
    ADD CONSTRAINT pk_futures PRIMARY KEY (arrival);
ALTER TABLE ONLY public.kept_samples
    ADD CONSTRAINT pk_kept_samples PRIMARY KEY ("position");
ALTER TABLE ONLY public.keys
    ADD CONSTRAINT pk_keys PRIMARY KEY (key_id);
ALTER TABLE ONLY public.models
    ADD CONSTRAINT pk_models PRIMARY KEY (model_id);
ALTER TABLE ONLY public.openai_batches
    ADD CONSTRAINT pk_openai_batches PRIMARY KEY ("position");
ALTER TABLE ONLY public.recent_steps
    ADD CONSTRAINT pk_recent_steps PRIMARY KEY ("position");
ALTER TABLE ONLY public.samplers
    ADD CONSTRAINT pk_samplers PRIMARY KEY (sampling_session_id);
ALTER TABLE ONLY public.sequences
    ADD CONSTRAINT pk_sequences PRIMARY KEY (sequence_id);
ALTER TABLE ONLY public.sessions
    ADD CONSTRAINT pk_sessions PRIMARY KEY (session_id);
ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT pk_tenants PRIMARY KEY (tenant_id);
ALTER TABLE ONLY public.usage
    ADD CONSTRAINT pk_usage PRIMARY KEY (bucket_start, session_id, base_model, type);
ALTER TABLE ONLY public.files
    ADD CONSTRAINT uq_files_file_id UNIQUE (file_id);
ALTER TABLE ONLY public.futures
    ADD CONSTRAINT uq_futures_model_id_seq_id UNIQUE (model_id, seq_id);
ALTER TABLE ONLY public.futures
    ADD CONSTRAINT uq_futures_request_id UNIQUE (request_id);
ALTER TABLE ONLY public.futures
    ADD CONSTRAINT uq_futures_sampling_session_id_seq_id UNIQUE (sampling_session_id, seq_id);
ALTER TABLE ONLY public.keys
    ADD CONSTRAINT uq_keys_digest UNIQUE (digest);
ALTER TABLE ONLY public.openai_batches
    ADD CONSTRAINT uq_openai_batches_batch_id UNIQUE (batch_id);
CREATE INDEX ix_audit_created ON public.audit USING btree (created_at);
CREATE INDEX ix_audit_tenant_created ON public.audit USING btree (tenant_id, created_at);
CREATE INDEX ix_batch_job_root ON public.batch_job USING btree (root_job_id);
CREATE INDEX ix_batch_job_status ON public.batch_job USING btree (status);
CREATE INDEX ix_batch_job_tenant_id ON public.batch_job USING btree (tenant_id, job_id);
CREATE INDEX ix_batch_state_dispatched ON public.batch_state USING btree (lease_expires_at) WHERE ((status)::text = 'DISPATCHED'::text);
CREATE INDEX ix_batch_state_pending ON public.batch_state USING btree (job_id, start_idx) WHERE ((status)::text = 'PENDING'::text);
CREATE INDEX ix_batch_state_rows ON public.batch_state USING btree (job_id, start_idx);
CREATE INDEX ix_batch_worker_job ON public.batch_worker USING btree (job_id);
CREATE INDEX ix_checkpoints_expires ON public.checkpoints USING btree (expires_at);
CREATE INDEX ix_checkpoints_tenant_created ON public.checkpoints USING btree (tenant_id, created_at);
CREATE INDEX ix_custom_losses_session ON public.custom_losses USING btree (session_id);
CREATE INDEX ix_files_expires_at ON public.files USING btree (expires_at);
CREATE INDEX ix_files_tenant ON public.files USING btree (tenant_id, "position");
CREATE INDEX ix_futures_session ON public.futures USING btree (session_id);
CREATE INDEX ix_futures_settle_order ON public.futures USING btree (sampling_session_id, settle_order);
CREATE INDEX ix_futures_tenant_settled ON public.futures USING btree (tenant_id, state, settled_at);
CREATE INDEX ix_futures_work ON public.futures USING btree (base_model, state, arrival);
CREATE INDEX ix_kept_samples_created ON public.kept_samples USING btree (created_at);
CREATE INDEX ix_kept_samples_request ON public.kept_samples USING btree (request_id);
CREATE INDEX ix_kept_samples_tenant ON public.kept_samples USING btree (tenant_id, "position");
CREATE INDEX ix_keys_tenant ON public.keys USING btree (tenant_id);
CREATE INDEX ix_models_session ON public.models USING btree (session_id);
CREATE INDEX ix_models_state_tenant ON public.models USING btree (state, tenant_id);
CREATE INDEX ix_models_tenant_created ON public.models USING btree (tenant_id, created_at);
CREATE INDEX ix_openai_batches_active ON public.openai_batches USING btree ("position") WHERE (ended_at IS NULL);
CREATE INDEX ix_openai_batches_tenant ON public.openai_batches USING btree (tenant_id, "position");
CREATE INDEX ix_recent_steps_base ON public.recent_steps USING btree (base_model, "position");
CREATE INDEX ix_samplers_directory ON public.samplers USING btree (directory) WHERE (directory IS NOT NULL);
CREATE INDEX ix_samplers_session ON public.samplers USING btree (session_id);
CREATE INDEX ix_samplers_version ON public.samplers USING btree (version_id);
CREATE INDEX ix_sequences_session ON public.sequences USING btree (session_id);
CREATE INDEX ix_sequences_valid_until ON public.sequences USING btree (valid_until);
CREATE INDEX ix_sessions_closed_heartbeat ON public.sessions USING btree (closed_at, last_heartbeat_at);
CREATE INDEX ix_sessions_forgotten_closed ON public.sessions USING btree (forgotten_at, closed_at);
CREATE INDEX ix_sessions_tenant_created ON public.sessions USING btree (tenant_id, created_at);
CREATE INDEX ix_usage_tenant_bucket ON public.usage USING btree (tenant_id, bucket_start);
